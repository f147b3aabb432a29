// The memory of tensors that a save reads while training continues.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <optional>

namespace tessera::checkpoint {

/// [Note: copies when they must be]
///
/// A save under way reads the memory of the state's own tensors. It holds that
/// memory: the first operation that writes to a tensor, most often the next
/// optimizer step, gives the tensor's storage a copy to write to and leaves the
/// old memory to the save. If the save has released the memory by then, the
/// storage takes it back and nothing is copied.
///
/// This relies on one guarantee of LibTorch 2.13: whoever writes to a tensor
/// asks its storage for the address, and a storage that has a materializer
/// (c10/core/StorageMaterializer.h) calls it on that thread before it hands the
/// address out. This file decides who frees the memory; LibTorch's own
/// copy-on-write (c10/core/impl/COW.h) is not used, because its count drops
/// before its lock is taken: a thread that drops the last clone frees the lock
/// that another thread is about to take.
///
/// - A block belongs to the storage and to those who hold it, by a shared
///   pointer: the last one frees the memory, on whatever thread.
/// - Under one mutex a holder lets go, and a storage that is written to looks
///   whether anybody still holds its block. So all reads of a save come before
///   the first write to memory that was taken back.
/// - After hold() nobody touches the storage but those who use the tensor. A
///   save may end, or be dropped, on any thread at any time.
///
/// LibTorch 2.11 and 2.12 have no materializer. With them no memory can be
/// held.

/// A tensor with the same values in the same memory, for reading only. The
/// result holds that memory for as long as it lives. Counts as a write to
/// `tensor`: nobody else may use the tensor during the call.
///
/// Returns nothing if the memory cannot be held and must be copied: memory of
/// devices, memory that LibTorch's allocators did not allocate, and memory of
/// lazy clones or of tensors that are not contiguous.
std::optional<at::Tensor> hold(const at::Tensor& tensor);

/// Whether hold() was called for this memory and nobody has written to it
/// since.
bool is_held(const c10::DataPtr& data);

} // namespace tessera::checkpoint
