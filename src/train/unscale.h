// Divides gradients by a scale, and finds those that are not finite.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace tessera::train {

/// Throws c10::ValueError if gradients of the optimizer cannot be unscaled
/// before its step: float16 parameters, an optimizer that steps in backward.
/// Depends on nothing that differs between the ranks.
void check_can_unscale(const torch::optim::Optimizer& optimizer);

/// Divides all gradients by `scale`, a float32 scalar. Returns a float32 scalar
/// on the device of `scale`: 1 if a gradient was infinite or NaN, else 0. Does
/// not wait for a device unless gradients are on another one than `scale`.
at::Tensor unscale_gradients(
    const torch::optim::Optimizer& optimizer,
    const at::Tensor& scale);

} // namespace tessera::train
