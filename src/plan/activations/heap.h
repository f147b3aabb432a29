// Blocks of memory that tensors share, counted as LibTorch counts storages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/activations/step_event.h"

namespace tessera::plan {

class Heap {
 public:
  using Block = size_t;

  /// Where allocations and frees are noted from now on.
  void note_in(StepEvents& events) {
    events_ = &events;
  }
  /// A block with one owner. Throws TooLarge if all blocks together are.
  Block allocate(int64_t bytes);
  /// A block of something else than activations (a parameter, a constant):
  /// never allocated, never freed.
  Block outside();

  void retain(Block block) {
    ++blocks_[block].owners;
  }
  /// Frees the block if this was the last owner.
  void release(Block block);
  /// For memory that an operator allocates and frees.
  void touch(int64_t bytes);

  bool is_shared(Block block) const {
    return blocks_[block].owners > 1;
  }
  bool is_outside(Block block) const {
    return blocks_[block].is_outside;
  }
  int64_t bytes_of(Block block) const {
    return blocks_[block].bytes;
  }

 private:
  struct Memory {
    int64_t bytes = 0;
    int64_t owners = 1;
    bool is_outside = false;
  };

  std::vector<Memory> blocks_;
  int64_t live_ = 0;
  StepEvents* events_ = nullptr;
};

} // namespace tessera::plan
