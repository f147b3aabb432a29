#pragma once

#include <algorithm>
#include <chrono>

namespace tessera::launch {

/// An attempt that fails sooner than this counts towards a crash loop.
constexpr std::chrono::seconds kSteadyAfter{60};
constexpr std::chrono::milliseconds kFirstDelay{500};
constexpr std::chrono::milliseconds kLongestDelay{30000};

/// How long to wait before the next attempt, after this many in a row failed
/// early: the first failure may be bad luck and is followed by a restart at
/// once; from the second on the delay doubles, so that a program that always
/// crashes does not overload what it needs at its start (file servers, name
/// servers, logs).
constexpr std::chrono::milliseconds restart_delay(int early_failures) {
  if (early_failures < 2) {
    return std::chrono::milliseconds(0);
  }
  constexpr int kMostDoublings = 10; // far above the longest delay
  const int doublings = std::min(early_failures - 2, kMostDoublings);
  return std::min(kFirstDelay * (1 << doublings), kLongestDelay);
}

} // namespace tessera::launch
