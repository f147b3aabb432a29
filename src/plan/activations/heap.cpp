#include "plan/activations/heap.h"

#include "plan/checked.h"

namespace tessera::plan {

Heap::Block Heap::allocate(int64_t bytes) {
  live_ = plus(live_, bytes);
  blocks_.push_back({.bytes = bytes});
  events_->push_back({.kind = StepEvent::Kind::Allocate, .bytes = bytes});
  return blocks_.size() - 1;
}

Heap::Block Heap::outside() {
  blocks_.push_back({.is_outside = true});
  return blocks_.size() - 1;
}

void Heap::release(Block block) {
  Memory& memory = blocks_[block];
  if (--memory.owners == 0 && !memory.is_outside) {
    live_ -= memory.bytes;
    events_->push_back({.kind = StepEvent::Kind::Free, .bytes = memory.bytes});
  }
}

void Heap::touch(int64_t bytes) {
  release(allocate(bytes));
}

} // namespace tessera::plan
