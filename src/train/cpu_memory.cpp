#include "train/cpu_memory.h"

#include <c10/core/CPUAllocator.h>

#include <malloc.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace tessera::train {
namespace {

constexpr int64_t kNobodyAsks = std::numeric_limits<int64_t>::max();
constexpr int64_t kSteps = 64;

thread_local bool follows_peak = false;

int64_t size_of(void* data) {
  return static_cast<int64_t>(malloc_usable_size(data));
}

} // namespace

CpuMemory::CpuMemory(c10::Allocator& wrapped)
    : wrapped_(wrapped),
      wrapped_deleter_(wrapped.raw_deleter()),
      peak_(kNobodyAsks) {}

CpuMemory& CpuMemory::instance() {
  static auto& memory = *[] {
    auto* made = new CpuMemory(
        *c10::GetCPUAllocator()); // blocks may outlive everything else
    c10::SetCPUAllocator(made, /*priority=*/1);
    return made;
  }();
  return memory;
}

bool CpuMemory::counts(const c10::DataPtr& data) {
  return data.get_deleter() == &release;
}

c10::DataPtr CpuMemory::allocate(size_t bytes) {
  if (follows_peak) {
    tell_growth();
  }
  c10::DataPtr data = wrapped_.allocate(bytes);
  // Memory of another kind (from another wrapper) is passed through.
  if (data.get() != nullptr && data.get_context() == data.get() &&
      wrapped_deleter_ != nullptr &&
      data.compare_exchange_deleter(wrapped_deleter_, &release)) {
    add(size_of(data.get()));
  }
  return data;
}

c10::DeleterFnPtr CpuMemory::raw_deleter() const {
  return wrapped_deleter_ == nullptr ? nullptr : &release;
}

void CpuMemory::copy_data(void* to, const void* from, size_t bytes) const {
  wrapped_.copy_data(to, from, bytes);
}

void CpuMemory::release(void* data) {
  CpuMemory& memory = instance();
  memory.live_.fetch_sub(size_of(data), std::memory_order_relaxed);
  memory.wrapped_deleter_(data);
}

void CpuMemory::add(int64_t bytes) {
  const int64_t live =
      live_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < live &&
         !peak_.compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
  }
  if (follows_peak && live >= next_) {
    next_ = live + std::max(grain_, (live - begin_) / kSteps);
    has_grown_ = true;
  }
}

/// Not at the moment of growth: whoever asked for the memory has not stored it
/// anywhere yet.
void CpuMemory::tell_growth() {
  if (std::exchange(has_grown_, false)) {
    on_growth_();
  }
}

void CpuMemory::start_peak(std::function<void()> on_growth, int64_t grain) {
  on_growth_ = std::move(on_growth);
  grain_ = std::max<int64_t>(grain, 1);
  begin_ = live_bytes();
  next_ = begin_ + grain_;
  has_grown_ = false;
  peak_ = begin_;
  follows_peak = true;
}

int64_t CpuMemory::stop_peak() {
  tell_growth();
  follows_peak = false;
  on_growth_ = nullptr;
  return peak_.exchange(kNobodyAsks);
}

} // namespace tessera::train
