#pragma once

#include <tessera/api.h>

#include <torch/optim/optimizer.h>

#include <optional>
#include <string>

namespace tessera::optim {

/// An optimizer that can tell whether its step can be captured in a graph of
/// the device: whether all that changes from step to step, learning rates too,
/// is read on the device. Those of Adam, AdamW and SGD can; NamedOptimizer and
/// ZeroRedundancyOptimizer ask the optimizer inside. CapturedStep asks.
class TESSERA_API Capturable {
 public:
  virtual ~Capturable() = default;

  /// Why the step cannot be captured, as a sentence; nothing if it can. Not
  /// collective.
  virtual std::optional<std::string> capture_objection() const = 0;
};

/// The same for any optimizer: those of LibTorch count steps on the host.
TESSERA_API std::optional<std::string> capture_objection(
    const torch::optim::Optimizer& optimizer);

} // namespace tessera::optim
