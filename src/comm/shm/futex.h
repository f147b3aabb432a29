// Sleeping on a 32-bit word in memory that several processes map.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace tessera::comm::shm {

using FutexWord = std::atomic<uint32_t>;
static_assert(sizeof(FutexWord) == sizeof(uint32_t));
static_assert(FutexWord::is_always_lock_free);

/// Sleeps until the word is woken, `timeout` passes, or at once if the word no
/// longer holds `expected`. May also return for no reason: callers loop.
inline void futex_wait(
    FutexWord& word,
    uint32_t expected,
    std::chrono::nanoseconds timeout) {
  constexpr int64_t kNanosPerSecond = 1'000'000'000;
  timespec limit{};
  limit.tv_sec = timeout.count() / kNanosPerSecond;
  limit.tv_nsec = timeout.count() % kNanosPerSecond;
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

/// Wakes everyone asleep on the word, in every process.
inline void futex_wake_all(FutexWord& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace tessera::comm::shm
