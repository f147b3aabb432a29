#include "train/peak.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <atomic>

#include "libtorch/backward_hooks.h"
#include "train/cpu_memory.h"

namespace tessera::train {
namespace {

/// The instance that is told about backwards.
std::atomic<Peak*> active_peak{nullptr};

const auto& allocated(const c10::CachingDeviceAllocator::DeviceStats& stats) {
  return stats.allocated_bytes[static_cast<size_t>(
      c10::CachingAllocator::StatType::AGGREGATE)];
}

c10::DeviceAllocator& allocator_of(at::Device device) {
  return *c10::getDeviceAllocator(device.type());
}

} // namespace

Peak::Peak(MemoryCensus& holdings) : holdings_(holdings) {
  if (!holdings.device().is_cpu()) {
    holdings.take_stock([](const c10::DataPtr&) { return true; });
    start_on_device();
    return;
  }
  CpuMemory& memory = CpuMemory::instance();
  const int64_t counted = holdings.take_stock(&CpuMemory::counts);
  first_ = at_most_ = holdings.now();
  live_ = memory.live_bytes();
  unknown_ = std::max<int64_t>(0, live_ - counted);
  constexpr int64_t kParts = 64;
  memory.start_peak(
      [this] { at_most_ = holdings_.now(); }, first_.total() / kParts);
}

void Peak::start_on_device() {
  const at::Device device = holdings_.device();
  first_ = at_most_ = holdings_.now();
  allocator_of(device).resetPeakStats(device.index());
  live_ = most_ =
      allocated(allocator_of(device).getDeviceStats(device.index())).current;
  unknown_ = std::max<int64_t>(0, live_ - first_.total());
  active_peak = this;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&on_backward)
          .scopes({at::RecordScope::BACKWARD_FUNCTION}));
  watch_.emplace([this](const comm::CallEvent& event) {
    // Not from other threads than the step's: units may change meanwhile.
    if (event.kind == comm::CallEvent::Kind::Starts &&
        (std::this_thread::get_id() == thread_ ||
         libtorch::current_backward() >= 0)) {
      look_at_device();
    }
  });
}

std::unique_ptr<at::ObserverContext> Peak::on_backward(
    const at::RecordFunction&) {
  Peak* peak = active_peak;
  const int number = libtorch::current_backward();
  if (peak != nullptr && peak->last_backward_ != number) {
    peak->last_backward_ = number;
    peak->look_at_device();
  }
  return nullptr;
}

void Peak::look_at_device() {
  const at::Device device = holdings_.device();
  const int64_t most =
      allocated(allocator_of(device).getDeviceStats(device.index())).peak;
  allocator_of(device).resetPeakStats(device.index());
  if (most > most_) {
    most_ = most;
    at_most_ = holdings_.now();
  }
}

void Peak::stop() {
  if (!is_running_) {
    return;
  }
  is_running_ = false;
  if (holdings_.device().is_cpu()) {
    most_ = CpuMemory::instance().stop_peak();
    return;
  }
  watch_.reset();
  at::removeCallback(*callback_);
  active_peak = nullptr;
  look_at_device();
}

Peak::~Peak() {
  stop();
}

MemoryByKind Peak::finish() {
  stop();
  MemoryByKind result = at_most_;
  result.activations =
      std::max<int64_t>(0, most_ - live_ - (at_most_.total() - first_.total()));
  result.other += unknown_;
  return result;
}

} // namespace tessera::train
