// The gradient of a shard.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::engine {

/// [Note: gradients of shards]
///
/// The gradient of a shard is a plain tensor, but what Tensor::data() gives of
/// it carries the key of faces and leaves, so that the fallback sees who writes
/// through it. That is how torch::nn::utils::clip_grad_norm_ scales gradients,
/// by the norm of those that it was given: of one rank's part. It is refused.
/// A program that knows the norm over all ranks multiplies the gradient itself.
///
/// As alias_of(), for a gradient.
at::Tensor gradient_alias_of(
    const at::Tensor& base,
    at::IntArrayRef sizes,
    int64_t offset);

/// True for what Tensor::data() gave of a shard's gradient, or a view of it.
bool is_data_of_gradient(const at::Tensor& tensor);

} // namespace tessera::engine
