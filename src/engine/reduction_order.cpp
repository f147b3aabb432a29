#include "engine/reduction_order.h"

#include <algorithm>

namespace tessera::engine {

std::vector<ReductionOrder::Advance> ReductionOrder::make_room(
    int unit,
    int64_t bytes,
    int64_t overlap_bytes) {
  if (has(unit)) { // used twice: its buffer travels
    return finish();
  }
  std::vector<Advance> steps;
  if (over_shards_.empty()) {
    finish_over_copies(steps);
  }
  while (!has_room(bytes, overlap_bytes)) {
    advance_oldest(steps);
  }
  return steps;
}

std::vector<ReductionOrder::Advance> ReductionOrder::finish() {
  std::vector<Advance> steps;
  while (!over_shards_.empty()) {
    advance_oldest(steps);
  }
  finish_over_copies(steps);
  return steps;
}

void ReductionOrder::forget(int unit) {
  const auto is_it = [unit](const Reduction& one) { return one.unit == unit; };
  std::erase_if(over_shards_, is_it);
  std::erase_if(over_copies_, is_it);
}

bool ReductionOrder::has(int unit) const {
  const auto is_it = [unit](const Reduction& one) { return one.unit == unit; };
  return std::any_of(over_shards_.begin(), over_shards_.end(), is_it) ||
      std::any_of(over_copies_.begin(), over_copies_.end(), is_it);
}

bool ReductionOrder::has_room(int64_t bytes, int64_t overlap_bytes) const {
  if (over_shards_.empty()) {
    return true;
  }
  if (overlap_bytes == 0 || over_shards_.front().goes_on_to_copies) {
    return false;
  }
  int64_t largest = bytes;
  int64_t others = bytes;
  for (const Reduction& one : over_shards_) {
    largest = std::max(largest, one.bytes);
    others += one.bytes;
  }
  return others - largest <= overlap_bytes;
}

/// What was over the copies is finished; what has been over the shards longest
/// follows it there, or is finished, too.
void ReductionOrder::advance_oldest(std::vector<Advance>& steps) {
  finish_over_copies(steps);
  const Reduction oldest = over_shards_.front();
  over_shards_.pop_front();
  if (oldest.goes_on_to_copies) {
    over_copies_.push_back(oldest);
    steps.push_back({oldest.unit, Advance::To::Copies});
  } else {
    steps.push_back({oldest.unit, Advance::To::Leaves});
  }
}

void ReductionOrder::finish_over_copies(std::vector<Advance>& steps) {
  for (const Reduction& one : over_copies_) {
    steps.push_back({one.unit, Advance::To::Leaves});
  }
  over_copies_.clear();
}

} // namespace tessera::engine
