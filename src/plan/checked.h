// Arithmetic on sizes that throws when they are too large to be counted.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace tessera::plan {

/// The request cannot be planned. what() says what to change.
class PlanError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// More than a 64-bit number of bytes or elements.
class TooLarge : public PlanError {
 public:
  TooLarge()
      : PlanError(
            "the sizes do not fit 64-bit numbers: more than 9.2 exabytes, or as many elements. Check the shape, the batch and the number of ranks.") {
  }
};

inline int64_t plus(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw TooLarge();
  }
  return sum;
}

inline int64_t times(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw TooLarge();
  }
  return product;
}

template <class... Factors>
int64_t times(int64_t a, int64_t b, Factors... others) {
  return times(times(a, b), static_cast<int64_t>(others)...);
}

} // namespace tessera::plan
