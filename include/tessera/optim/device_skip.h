#pragma once

#include <tessera/api.h>

#include <ATen/core/Tensor.h>

namespace tessera::optim {

/// An optimizer whose kernels can leave out a step by themselves, so that the
/// host need not wait for the device to learn whether gradients are finite.
/// Adam and AdamW are, and NamedOptimizer and ZeroRedundancyOptimizer if they
/// wrap one. GradScaler asks for it.
class TESSERA_API DeviceSkip {
 public:
  virtual ~DeviceSkip() = default;

  /// Until the next call, steps leave parameters and state as they are where
  /// `found_inf`, a float32 scalar on the device, is 1 when the kernel runs,
  /// and are made where it is 0. (A parameter without state gets the state from
  /// before its first step, as in Python.) An undefined tensor ends that.
  /// Returns whether the kernels can do it; if not, nothing has changed. Not
  /// collective.
  virtual bool skip_where(const at::Tensor& found_inf) = 0;
};

} // namespace tessera::optim
