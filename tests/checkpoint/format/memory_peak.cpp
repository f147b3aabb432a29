#include "checkpoint/format/memory_peak.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<size_t> alive{0};
std::atomic<size_t> peak{0};

} // namespace

// Replaces the global operators in this test program only.
void* operator new(size_t size) {
  void* memory = std::malloc(size);
  if (!memory) {
    throw std::bad_alloc();
  }
  const size_t now = alive += malloc_usable_size(memory);
  size_t most = peak;
  while (most < now && !peak.compare_exchange_weak(most, now)) {
  }
  return memory;
}

void operator delete(void* memory) noexcept {
  alive -= malloc_usable_size(memory);
  std::free(memory);
}

void operator delete(void* memory, size_t) noexcept {
  operator delete(memory);
}

namespace tessera::format {

size_t peak_bytes_of(const std::function<void()>& run) {
  const size_t before = alive;
  peak = before;
  run();
  return peak - before;
}

} // namespace tessera::format
