#include "zero/owner_assignment.h"

#include <algorithm>
#include <numeric>

namespace tessera::zero {

std::vector<Ownership> OwnerAssignment::add_group(
    const std::vector<int64_t>& numels) {
  std::vector<size_t> order(numels.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return numels[a] > numels[b];
  });
  std::vector<Ownership> result;
  for (const size_t param : order) {
    // A rank without parameters has no elements, and so has one whose
    // parameters are empty: the latter is the lower.
    const bool has_free_rank = num_owners_ < num_ranks_;
    const bool is_new =
        has_free_rank && (owners_.empty() || owners_.top().first > 0);
    Load load{0, num_owners_};
    if (is_new) {
      ++num_owners_;
    } else {
      load = owners_.top();
      owners_.pop();
    }
    load.first += numels[param];
    owners_.push(load);
    result.push_back({param, load.second});
  }
  return result;
}

} // namespace tessera::zero
