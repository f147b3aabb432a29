// As much of CUDA as src/nn/cross_entropy.cu needs, on the host: the threads of
// a block are threads, and blocks run one after the other.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace tessera::testing::cuda {

struct Index {
  int x = 0;
};

inline thread_local Index threadIdx;
inline thread_local Index blockIdx;
inline thread_local std::barrier<>* block = nullptr;

/// Runs `kernel` in `blocks` blocks of `threads` threads.
inline void launch(
    int blocks,
    int threads,
    const std::function<void()>& kernel) {
  for (int index = 0; index < blocks; ++index) {
    std::barrier<> barrier(threads);
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread) {
      running.emplace_back([&, index, thread] {
        threadIdx = {thread};
        blockIdx = {index};
        block = &barrier;
        kernel();
      });
    }
    for (std::thread& thread : running) {
      thread.join();
    }
  }
}

// NOLINTBEGIN(bugprone-reserved-identifier): CUDA's names
inline void __trap() {
  std::abort();
}
inline void __syncthreads() {
  block->arrive_and_wait();
}
inline float __uint_as_float(unsigned bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __expf(float value) {
  return std::exp(value);
}
// NOLINTEND(bugprone-reserved-identifier)
inline float expf(float value) {
  return std::exp(value);
}
inline float logf(float value) {
  return std::log(value);
}

} // namespace tessera::testing::cuda

// NOLINTBEGIN(bugprone-reserved-identifier): CUDA's names
#define __global__ inline
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
// NOLINTEND(bugprone-reserved-identifier)
