#include "data/shuffle.h"

#include <bit>
#include <utility>

namespace tessera::data {

uint64_t mix_bits(uint64_t value, uint64_t key) {
  // The last steps of splitmix64.
  value += key * 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

int64_t shuffled_at(int64_t place, int64_t size, uint64_t key) {
  // A Feistel network permutes the numbers of 2 * half bits, whatever
  // mix_bits() does. Numbers beyond `size` are permuted again, which is a
  // permutation of the numbers below `size`.
  const int half = (std::bit_width(static_cast<uint64_t>(size)) + 1) / 2;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto found = static_cast<uint64_t>(place);
  do {
    uint64_t left = found >> half;
    uint64_t right = found & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      left ^= mix_bits(right, key + round) & mask;
      std::swap(left, right);
    }
    found = left << half | right;
  } while (found >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(found);
}

} // namespace tessera::data
