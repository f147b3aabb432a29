// The gradient of a shard.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::engine {

/// [Note: gradients of shards]
///
/// The gradient of a shard is a plain tensor, but the result of its
/// Tensor::data() carries the key of faces and leaves, so that the fallback
/// sees writes through it. torch::nn::utils::clip_grad_norm_ scales gradients
/// that way, by the norm of the gradients it was given, which is the norm of
/// one rank's part. Such writes are refused. A program that knows the norm over
/// all ranks multiplies the gradient itself.
///
/// Like alias_of(), for a gradient.
at::Tensor gradient_alias_of(
    const at::Tensor& base,
    at::IntArrayRef sizes,
    int64_t offset);

/// True for the result of Tensor::data() of a shard's gradient, or a view of
/// it.
bool is_data_of_gradient(const at::Tensor& tensor);

} // namespace tessera::engine
