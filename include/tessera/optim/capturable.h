#pragma once

#include <tessera/api.h>

#include <torch/optim/optimizer.h>

#include <optional>
#include <string>

namespace tessera::optim {

/// An optimizer that can tell whether its step can be captured in a CUDA graph.
/// That is so if everything that changes from step to step, learning rates
/// included, is read on the device. Steps of Adam, AdamW and SGD can be
/// captured; NamedOptimizer and ZeroRedundancyOptimizer ask the optimizer that
/// they wrap. CapturedStep calls capture_objection().
class TESSERA_API Capturable {
 public:
  virtual ~Capturable() = default;

  /// Why the step cannot be captured, as a sentence; std::nullopt if it can be.
  /// Not collective.
  virtual std::optional<std::string> capture_objection() const = 0;
};

/// The same for any optimizer. LibTorch's own optimizers cannot be captured,
/// since they count steps on the host.
TESSERA_API std::optional<std::string> capture_objection(
    const torch::optim::Optimizer& optimizer);

} // namespace tessera::optim
