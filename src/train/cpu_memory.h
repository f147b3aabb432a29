// Counts host memory of tensors as it is allocated.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <functional>

namespace tessera::train {

/// [Note: counting host memory]
///
/// LibTorch does not count what its CPU allocator hands out, so this class
/// wraps that allocator from its first use to the end of the process. A block
/// keeps its address as its context, and gets a deleter that asks the C library
/// for the block's size: nothing is stored per block, and code that inspects a
/// tensor's memory (as copy-on-write does) sees no difference. Blocks from
/// before keep their old deleter, and are not counted when they are freed.
///
/// Thread safety: memory may be allocated and freed on any thread.
class CpuMemory final : public c10::Allocator {
 public:
  /// The only instance. The first call wraps the current allocator.
  static CpuMemory& instance();

  int64_t live_bytes() const {
    return live_.load(std::memory_order_relaxed);
  }
  /// True if this memory is known to be in live_bytes(); false for memory that
  /// is shared until somebody writes.
  static bool counts(const c10::DataPtr& data);

  /// Follows the peak of live bytes. When the peak has grown by the larger of
  /// `grain` bytes and 1/64 of what was added since this call, `on_growth` is
  /// called on this thread, in the middle of its next allocation, or by
  /// stop_peak().
  void start_peak(std::function<void()> on_growth, int64_t grain);
  /// The peak since start_peak(). Call it on the thread that started it.
  int64_t stop_peak();

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

 private:
  explicit CpuMemory(c10::Allocator& wrapped);
  static void release(void* data);
  void add(int64_t bytes);
  void tell_growth();

  c10::Allocator& wrapped_;
  const c10::DeleterFnPtr wrapped_deleter_;
  std::atomic<int64_t> live_{0};
  std::atomic<int64_t> peak_; // the maximum while nobody asks

  // Used only by the thread that follows the peak.
  std::function<void()> on_growth_;
  int64_t grain_ = 0;
  int64_t begin_ = 0;
  int64_t next_ = 0;
  bool has_grown_ = false; // that was not reported
};

} // namespace tessera::train
