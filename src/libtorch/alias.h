// Tensors that share a storage, and tensors that change what they show.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace tessera::libtorch {

/// A new tensor that shares `base`'s storage and has its dispatch keys and
/// `more_keys`. For autograd the tensor is not a view: optimizers detach
/// gradients in place, which views refuse.
at::Tensor alias_of(
    const at::Tensor& base,
    at::IntArrayRef sizes,
    int64_t offset,
    c10::DispatchKeySet more_keys = {});

/// Makes `tensor` show what `other` shows: storage, shape, dtype, device. Its
/// identity, version counter and autograd metadata stay; set_data() would drop
/// a gradient edge, and refuses another kind of device.
void show(const at::Tensor& tensor, const at::Tensor& other);

} // namespace tessera::libtorch
