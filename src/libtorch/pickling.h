// Checks of the tensors that a program saves with torch::save().
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::libtorch {

/// [Note: saving tensors without values]
///
/// torch::save() calls no operator and, before LibTorch 2.13, reads no pointer
/// of a storage without bytes: it would write a sharded or deferred model
/// without its values. But it asks for the metadata of each tensor, through
/// functions that can be set for a kind of device. Our functions add no
/// metadata and call the checks.
using PicklingCheck = void (*)(const at::Tensor& tensor);

/// From now on torch::save() calls `check`, which may throw, for every tensor.
/// A check that was added before is not added again.
void check_before_pickling(PicklingCheck check);

} // namespace tessera::libtorch
