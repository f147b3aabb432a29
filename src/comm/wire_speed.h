// How long a network takes: what the fake backend pretends and what `tessera
// plan` predicts.
#pragma once

#include <cstdint>
#include <limits>

namespace tessera::comm {

/// How many bytes a rank sends, and receives at the same time, in an all-gather
/// or a reduce-scatter of `bytes`, if no byte is sent twice, as in a ring:
/// (ranks - 1) / ranks of them, rounded up. An all-reduce sends twice as many.
inline int64_t sent_of(int64_t bytes, int64_t ranks) {
  return bytes - bytes / ranks;
}

/// A network in two numbers. It carries one collective at a time.
struct WireSpeed {
  /// What a rank sends, and receives at the same time.
  double bytes_per_second = std::numeric_limits<double>::infinity();
  /// What a collective takes beside its bytes.
  double latency_seconds = 0;

  bool takes_time() const {
    return bytes_per_second < std::numeric_limits<double>::infinity() ||
        latency_seconds > 0;
  }
  /// The time of collectives in which each rank sends so much.
  double seconds(int64_t sent_bytes, int64_t collectives = 1) const {
    return static_cast<double>(sent_bytes) / bytes_per_second +
        static_cast<double>(collectives) * latency_seconds;
  }
};

} // namespace tessera::comm
