#include "support/memory_meter.h"

#include <c10/core/CPUAllocator.h>

#include <new>
#include <utility>

namespace tessera::testing {
namespace {

std::atomic<MemoryMeter*> active_meter{nullptr};
std::atomic<int> generations{0};

} // namespace

/// Stands in front of memory that is counted, which may outlive the meter. Some
/// kernels use the allocator raw: then a pointer to the memory must do to free
/// it.
struct alignas(64) MemoryMeter::Block { // keeps the allocator's alignment
  Block(c10::DataPtr all, size_t size, int counter)
      : memory(std::move(all)), bytes(size), generation(counter) {}

  c10::DataPtr memory; // this block, then what was asked for
  size_t bytes;
  int generation; // of the meter that counted it
};

MemoryMeter::MemoryMeter()
    : wrapped_(c10::GetCPUAllocator()), generation_(++generations) {
  active_meter = this;
  c10::SetCPUAllocator(this, /*priority=*/1);
}

MemoryMeter::~MemoryMeter() {
  c10::SetCPUAllocator(wrapped_, /*priority=*/1);
  active_meter = nullptr;
}

c10::DataPtr MemoryMeter::allocate(size_t bytes) {
  c10::DataPtr memory = wrapped_->allocate(sizeof(Block) + bytes);
  void* place = memory.get();
  auto* block = new (place) Block(std::move(memory), bytes, generation_);
  live_ += bytes;
  size_t peak = peak_;
  while (peak < live_ && !peak_.compare_exchange_weak(peak, live_)) {
  }
  void* data = block + 1;
  return {data, data, &release, c10::Device(c10::kCPU)};
}

void MemoryMeter::copy_data(void* to, const void* from, size_t bytes) const {
  default_copy_data(to, from, bytes);
}

void MemoryMeter::release(void* data) {
  Block* block = static_cast<Block*>(data) - 1;
  MemoryMeter* meter = active_meter;
  if (meter != nullptr && meter->generation_ == block->generation) {
    meter->live_ -= block->bytes;
  }
  const c10::DataPtr memory = std::move(block->memory); // frees it at the end
  block->~Block();
}

} // namespace tessera::testing
