// Keeps the memory of full and gradient buffers for the next unit.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>

#include "engine/idle_buffers.h"

namespace tessera::engine {

/// Hands out memory, and takes it back for the next request of the same size.
/// Units of one kind are of one size, so a handful of buffers serves a whole
/// model; page faults of freshly mapped memory would cost as much as the copies
/// into it. Devices other than the CPU have pools of their own in their
/// allocators, so requests for them are passed through.
///
/// Thread safety: one thread at a time, the one that runs the model.
class BufferPool {
 public:
  c10::DataPtr take(
      size_t bytes,
      c10::Device device,
      c10::Allocator& allocator);
  void give(c10::DataPtr data, size_t bytes);

  /// The same for a contiguous tensor, whose contents are undefined. Whoever
  /// gives a tensor back must hold the last reference to it.
  at::Tensor take(at::IntArrayRef sizes, const at::TensorOptions& options);
  void give(const at::Tensor& tensor);

  /// Keeps at most `count` buffers of each size.
  void trim(size_t count) {
    idle_.trim(count);
  }

  /// Calls `see(data, bytes)` for all memory that waits to be handed out again.
  template <class See>
  void for_each_idle(const See& see) const {
    idle_.for_each(see);
  }

 private:
  IdleBuffers<c10::DataPtr> idle_;
};

} // namespace tessera::engine
