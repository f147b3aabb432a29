#include "data/even_choice.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

namespace tessera::data {
namespace {

// Sums wrap; their differences are small and exact.
__extension__ using Wide = unsigned __int128;

constexpr uint64_t kPoints = uint64_t{1} << 32;
constexpr uint64_t kStep = 0x9e3779b9; // odd: every point is hit

/// The sum of floor((a * i + b) / m) for i from 0 to n - 1, modulo 2^128.
/// Euclid's algorithm, as for greatest common divisors.
Wide floor_sum(Wide n, Wide m, Wide a, Wide b) {
  Wide sum = 0;
  while (true) {
    if (a >= m && n > 0) {
      sum += n * (n - 1) / 2 * (a / m);
      a %= m;
    }
    if (b >= m) {
      sum += n * (b / m);
      b %= m;
    }
    const Wide last = a * n + b;
    if (last < m) {
      return sum;
    }
    n = last / m;
    b = last % m;
    std::swap(m, a);
  }
}

} // namespace

EvenChoice::EvenChoice(const std::vector<double>& weights, uint64_t start)
    : start_(start % kPoints) {
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  double so_far = 0;
  bounds_.push_back(0);
  for (const double weight : weights) {
    so_far += weight;
    const double share = std::min(so_far / all, 1.0);
    bounds_.push_back(static_cast<uint64_t>(
        std::llround(share * static_cast<double>(kPoints))));
  }
  bounds_.back() = kPoints;
}

bool EvenChoice::is_valid() const {
  return std::adjacent_find(
             bounds_.begin(), bounds_.end(), std::greater_equal<>()) ==
      bounds_.end();
}

EvenChoice::Choice EvenChoice::at(int64_t number) const {
  // Wraps modulo 2^64, a multiple of the circle.
  const uint64_t point =
      (start_ + static_cast<uint64_t>(number) * kStep) % kPoints;
  const auto end = std::upper_bound(bounds_.begin(), bounds_.end(), point);
  const auto which = static_cast<size_t>(end - bounds_.begin()) - 1;
  return {
      which,
      count_below(number, bounds_[which + 1]) -
          count_below(number, bounds_[which])};
}

int64_t EvenChoice::count_below(int64_t number, uint64_t bound) const {
  // x mod m < c is floor(x / m) - floor((x - c) / m), here with m added to
  // stay positive.
  const auto n = static_cast<Wide>(number);
  const Wide count = floor_sum(n, kPoints, kStep, start_) -
      floor_sum(n, kPoints, kStep, Wide{start_} + kPoints - bound) + n;
  return static_cast<int64_t>(count);
}

} // namespace tessera::data
