// Tensors without values that somebody saves.
#pragma once

namespace tessera::shard {

/// [Note: saving tensors without values]
///
/// torch::save() asks no operator and, before LibTorch 2.13, no pointer of a
/// storage that has no bytes: it would write a sharded or deferred model
/// without its values. But it asks for metadata of each tensor, by functions
/// that can be set for a kind of device. Ours add none, and throw for a
/// parameter whose unit is not gathered and for a deferred tensor.
///
/// Sets them, once a process.
void guard_pickling();

} // namespace tessera::shard
