// Tensors that share a storage, and tensors that change what they show.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::shard {

/// A tensor of its own that shares `base`'s storage, with the key of
/// [Note: first touch] or without. Not a view for autograd: optimizers detach
/// gradients in place, which views refuse.
at::Tensor alias_of(
    const at::Tensor& base,
    at::IntArrayRef sizes,
    int64_t offset,
    bool with_key = false);

/// Makes `tensor` show what `other` shows: storage, shape, dtype, device. Its
/// identity, version counter and autograd metadata stay; set_data() would drop
/// a gradient edge, and refuses another kind of device.
void show(const at::Tensor& tensor, const at::Tensor& other);

} // namespace tessera::shard
