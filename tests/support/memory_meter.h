// Counts host memory of tensors.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>

namespace tessera::testing {

/// While it lives, every allocation of LibTorch's CPU allocator in this process
/// is counted; memory from before is not counted, nor is freeing it. Only one
/// meter at a time.
class MemoryMeter : c10::Allocator {
 public:
  MemoryMeter();
  ~MemoryMeter() override;
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  size_t live_bytes() const {
    return live_;
  }
  /// The most at any time since the last call of reset_peak().
  size_t peak_bytes() const {
    return peak_;
  }
  void reset_peak() {
    peak_ = live_.load();
  }

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override;

 private:
  struct Block;
  static void release(void* data);

  c10::Allocator* wrapped_;
  const int generation_;
  std::atomic<size_t> live_{0};
  std::atomic<size_t> peak_{0};
};

} // namespace tessera::testing
