// Waiting for a peer to change a word in shared memory.
#pragma once

#include <sched.h>

#include <chrono>

#include "comm/shm/futex.h"

namespace tessera::comm::shm {

struct Patience {
  /// How long a waiting rank spins before it sleeps; zero where a host has more
  /// ranks than cores: the rank yields then, since the peer needs the core.
  std::chrono::microseconds spin{20};
  std::chrono::milliseconds timeout{0};
};

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spins or yields. True as soon as done() is.
template <class Done>
bool spin_until(const Done& done, std::chrono::microseconds spin) {
  constexpr int kYields = 24;
  constexpr int kPausesBetweenClockReads = 32;
  if (spin.count() == 0) {
    for (int i = 0; i < kYields; ++i) {
      sched_yield();
      if (done()) {
        return true;
      }
    }
    return false;
  }
  const auto end = std::chrono::steady_clock::now() + spin;
  do {
    for (int i = 0; i < kPausesBetweenClockReads; ++i) {
      pause_briefly();
      if (done()) {
        return true;
      }
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

/// True once done() is, which depends on `word`; false when the time is up. A
/// waiting rank spins briefly, then sleeps on `word` in slices of 50 ms, and
/// calls `check` before each, which throws where waiting is hopeless.
/// `sleepers` counts who sleeps on the word, for wake_sleepers().
template <class Done, class Check>
bool wait_until(
    FutexWord& word,
    FutexWord& sleepers,
    const Patience& patience,
    const Done& done,
    const Check& check) {
  constexpr std::chrono::milliseconds kSleepSlice{50};
  if (done() || spin_until(done, patience.spin)) {
    return true;
  }
  const auto end = std::chrono::steady_clock::now() + patience.timeout;
  while (true) {
    check();
    // Sequentially consistent, as is the side that changes the word: either
    // that side sees the sleeper, or the sleeper sees the new value.
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (!done()) {
      futex_wait(word, seen, kSleepSlice);
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (done()) {
      return true;
    }
    if (std::chrono::steady_clock::now() >= end) {
      return false;
    }
  }
}

/// After a sequentially consistent store to `word`.
inline void wake_sleepers(FutexWord& word, const FutexWord& sleepers) {
  if (sleepers.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(word);
  }
}

} // namespace tessera::comm::shm
