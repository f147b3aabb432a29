// Host memory of tensors, counted as it is handed out.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <functional>

namespace tessera::train {

/// [Note: counting host memory]
///
/// LibTorch does not count what its CPU allocator hands out, so an allocator
/// stands around it, from the first use of this class to the end of the
/// process. A block keeps its address as its context, and gets a deleter that
/// asks the C library for the block's size: nothing is remembered for a block,
/// and what looks at a tensor's memory (copy-on-write does) sees no difference.
/// Blocks from before have their old deleter, and do not count when they go.
///
/// Thread safety: memory comes and goes on any thread.
class CpuMemory final : public c10::Allocator {
 public:
  /// The only one. The first call puts it around the allocator of now.
  static CpuMemory& instance();

  int64_t live_bytes() const {
    return live_.load(std::memory_order_relaxed);
  }
  /// True if this memory is in live_bytes(), as far as can be seen: not where
  /// it is shared until somebody writes.
  static bool counts(const c10::DataPtr& data);

  /// Follows the most that is live. When that has grown by the larger of
  /// `grain` bytes and 1/64 of what was added since now, `on_growth` is called
  /// on this thread, in the middle of its next allocation, or by stop_peak().
  void start_peak(std::function<void()> on_growth, int64_t grain);
  /// The most since then. On the thread that started it.
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
  std::atomic<int64_t> peak_; // as large as can be while nobody asks

  // Touched by the thread that follows the peak.
  std::function<void()> on_growth_;
  int64_t grain_ = 0;
  int64_t begin_ = 0;
  int64_t next_ = 0;
  bool has_grown_ = false; // and was not told
};

} // namespace tessera::train
