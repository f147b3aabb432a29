// Choices among several that keep their proportions in every stretch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::data {

/// [Note: even choices]
///
/// Number n is mapped to a point of a circle of 2^32 points: start + n * step,
/// where step is the golden section of the circle. Each choice owns an arc as
/// long as its weight. The points of any stretch of numbers lie almost evenly
/// on the circle, so that each choice gets almost exactly its weight, in the
/// first ten numbers as in the first billion; 2^32 numbers hit each point once.
///
/// How often a choice was made before number n is a sum of floors, which takes
/// a few dozen divisions for any n (count_below). Nothing is stored, and any
/// number can be asked for first.
class EvenChoice {
 public:
  /// `weights` are positive and finite. `start` is any number.
  EvenChoice(const std::vector<double>& weights, uint64_t start);

  /// False if a weight is too small to have a point.
  bool is_valid() const;

  struct Choice {
    size_t which = 0;
    int64_t earlier = 0; // how often `which` was chosen for smaller numbers
  };
  Choice at(int64_t number) const;

 private:
  /// How many numbers below `number` have points below `bound`.
  int64_t count_below(int64_t number, uint64_t bound) const;

  std::vector<uint64_t> bounds_; // of the arcs: 0, ..., 2^32
  uint64_t start_ = 0; // below 2^32
};

} // namespace tessera::data
