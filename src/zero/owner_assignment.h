// Which rank steps which parameter, by their sizes. Knows no LibTorch:
// ZeroRedundancyOptimizer and `tessera plan` share this policy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace tessera::zero {

/// A parameter, by its position in its group, and the rank that steps it.
struct Ownership {
  size_t param = 0;
  int64_t rank = 0;
  bool operator==(const Ownership&) const = default;
};

/// Assigns parameters group after group. Within a group the largest parameter
/// comes first, and parameters of equal size stay in their order; each goes to
/// the rank that has the fewest elements so far, the lowest of those. Elements
/// of earlier groups count, so owners depend on sizes and order alone.
class OwnerAssignment {
 public:
  explicit OwnerAssignment(int64_t num_ranks) : num_ranks_(num_ranks) {}

  /// Owners of a group's parameters, the largest parameter first. Takes the
  /// same time for any number of ranks.
  std::vector<Ownership> add_group(const std::vector<int64_t>& numels);

 private:
  using Load = std::pair<int64_t, int64_t>; // elements, rank
  int64_t num_ranks_;
  /// Ranks below num_owners_ own a parameter; the others own nothing.
  int64_t num_owners_ = 0;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> owners_;
};

} // namespace tessera::zero
