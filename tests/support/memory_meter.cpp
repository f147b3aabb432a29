#include "support/memory_meter.h"

#include <c10/core/CPUAllocator.h>

namespace tessera::testing {
namespace {

std::atomic<MemoryMeter*> active_meter{nullptr};
std::atomic<int> generations{0};

} // namespace

/// What a counted DataPtr owns. It may outlive the meter.
struct MemoryMeter::Block {
  c10::DataPtr memory;
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
  auto* block = new Block{wrapped_->allocate(bytes), bytes, generation_};
  live_ += bytes;
  size_t peak = peak_;
  while (peak < live_ && !peak_.compare_exchange_weak(peak, live_)) {
  }
  return {block->memory.get(), block, &release, c10::Device(c10::kCPU)};
}

void MemoryMeter::copy_data(void* to, const void* from, size_t bytes) const {
  default_copy_data(to, from, bytes);
}

void MemoryMeter::release(void* context) {
  auto* block = static_cast<Block*>(context);
  MemoryMeter* meter = active_meter;
  if (meter != nullptr && meter->generation_ == block->generation) {
    meter->live_ -= block->bytes;
  }
  delete block;
}

} // namespace tessera::testing
