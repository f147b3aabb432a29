// Which stream a backward runs on.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace tessera::libtorch {

/// Autograd runs a node on the stream that was current when the node was made.
/// Whoever holds a leaf's gradient accumulator holds it on an old stream: this
/// moves the accumulator of `leaf`, which needs a gradient, to the stream that
/// is current now.
void use_current_stream(const at::Tensor& leaf);

/// The same for the accumulator of `leaf` that a node leads to. Autograd visits
/// it in each backward, also while the leaf is frozen.
void use_current_stream(
    torch::autograd::Node& accumulator,
    const at::Tensor& leaf);

} // namespace tessera::libtorch
