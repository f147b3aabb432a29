// Tensors that somebody saves with torch::save.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::engine {

/// [Note: saving tensors without values]
///
/// torch::save() asks no operator and, before LibTorch 2.13, no pointer of a
/// storage that has no bytes: it would write a sharded or deferred model
/// without its values. But it asks for metadata of each tensor, by functions
/// that can be set for a kind of device. Ours add none, and call the checks.
using PicklingCheck = void (*)(const at::Tensor& tensor);

/// From now on torch::save() calls `check`, which may throw, for every tensor.
/// A check that is added again is not called twice.
void check_before_pickling(PicklingCheck check);

} // namespace tessera::engine
