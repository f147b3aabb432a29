// Random orders that are computed place by place.
#pragma once

#include <cstdint>

namespace tessera::data {

/// Bits that depend on every bit of both.
uint64_t mix_bits(uint64_t value, uint64_t key);

/// The key of an epoch's order.
inline uint64_t epoch_key(uint64_t seed, int64_t epoch) {
  return mix_bits(seed, static_cast<uint64_t>(epoch) + 1);
}

/// What stands at `place` in a random order of 0 to size - 1 that `key`
/// determines.
int64_t shuffled_at(int64_t place, int64_t size, uint64_t key);

} // namespace tessera::data
