#include "plan/gather_order.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::plan {
namespace {

/// As in engine/schedule.cpp.
constexpr int kKeptInBackward = 1;

} // namespace

void GatherOrder::begin_forward() {
  in_backward_ = false;
  last_gathers_ = std::exchange(gathers_, {});
}

void GatherOrder::remove_full(size_t unit) {
  full_.erase(std::prev(std::find(full_.rbegin(), full_.rend(), unit).base()));
}

std::vector<size_t> GatherOrder::to_reshard_before(
    size_t unit,
    const std::function<bool(size_t)>& is_gathering) const {
  std::vector<size_t> result;
  if (!options_.reshards_after_forward) {
    return result;
  }
  int kept = 0;
  for (auto other = full_.rbegin(); other != full_.rend(); ++other) {
    const bool is_needed =
        *other == options_.root || *other == unit || is_gathering(*other);
    if (!is_needed && !(in_backward_ && kept++ < kKeptInBackward)) {
      result.push_back(*other);
    }
  }
  return result;
}

std::optional<size_t> GatherOrder::next_after(size_t unit) {
  gathers_.push_back(unit);
  const size_t next = gathers_.size();
  return options_.gathers_ahead && next < last_gathers_.size()
      ? std::optional(last_gathers_[next])
      : std::nullopt;
}

} // namespace tessera::plan
