#pragma once

#include <tessera/api.h>

#include <ATen/core/Tensor.h>

namespace tessera::optim {

/// An optimizer whose kernels can leave out a step by themselves, so that the
/// host need not wait for the device to learn whether gradients are finite.
/// Adam and AdamW can, and so can NamedOptimizer and ZeroRedundancyOptimizer
/// over either of them. GradScaler uses it.
class TESSERA_API DeviceSkip {
 public:
  virtual ~DeviceSkip() = default;

  /// Until the next call, a step is made if `found_inf`, a float32 scalar on
  /// the device, is 0 when the kernel runs; if it is 1, parameters and state
  /// stay as they are. (A parameter without state gets the state from before
  /// its first step, as in Python.) With an undefined tensor, all steps are
  /// made again. Returns whether the kernels support this; if not, nothing has
  /// changed. Not collective.
  virtual bool skip_where(const at::Tensor& found_inf) = 0;
};

} // namespace tessera::optim
