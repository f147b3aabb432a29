#include "engine/gather_order.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::engine {
namespace {

constexpr int kGap = -1; // a unit that died

bool contains(const std::vector<int>& units, int unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

} // namespace

void GatherOrder::free(int unit) {
  std::erase(held_, unit);
  std::erase(stayed_, unit);
}

void GatherOrder::begin_iteration(int first) {
  if (!orders_.recorded.empty() && orders_.recorded.front() != kGap) {
    const int known_by = orders_.recorded.front();
    orders_.known[known_by] = std::move(orders_.recorded);
  }
  orders_.recorded.clear();
  const auto known = orders_.known.find(first);
  orders_.expected =
      known == orders_.known.end() ? std::vector<int>() : known->second;
  orders_.foresees = !orders_.expected.empty();
  orders_.position = 0;
  orders_.is_iteration_ended = false;
}

void GatherOrder::record(int unit) {
  std::erase(stayed_, unit);
  if (orders_.is_iteration_ended) {
    begin_iteration(unit);
  }
  if (orders_.recorded.size() < kMaxRecord) {
    orders_.recorded.push_back(unit);
  }
  orders_.foresees = orders_.foresees &&
      orders_.position < orders_.expected.size() &&
      orders_.expected[orders_.position] == unit;
  ++orders_.position;
}

bool GatherOrder::record_stayed(int unit) {
  if (std::erase(stayed_, unit) == 0) {
    return false;
  }
  record(unit);
  return true;
}

/// The units to hold beside `in_use`, in the order in which they are needed,
/// and `in_use` itself if it is needed again. Where no unit is in use, the next
/// one to be used takes its place.
std::vector<int> GatherOrder::look_ahead(
    bool across_iterations,
    std::optional<int> in_use,
    const DescribeNeeded& describe) const {
  std::vector<int> units;
  const std::vector<int>& expected = orders_.expected;
  if (orders_.is_iteration_ended || !orders_.foresees ||
      orders_.position > expected.size()) {
    return units;
  }
  const size_t rest = expected.size() - orders_.position;
  const size_t seen = rest + (across_iterations ? expected.size() : 0);
  int64_t bytes = 0; // of the units ahead
  int64_t largest = 0; // of these
  bool any = false;
  for (size_t i = 0; i < seen; ++i) {
    const bool is_next_iteration = i >= rest;
    const int unit = expected[(orders_.position + i) % expected.size()];
    if (unit == kGap) {
      break;
    }
    const NeededUnit needed = describe(unit);
    if (is_next_iteration && !needed.accumulates) {
      break; // an optimizer writes before it
    }
    const bool is_listed = contains(units, unit);
    if (is_listed || unit == in_use) { // it is there already
      if (!is_next_iteration) {
        break; // it will be freed before that use
      }
      if (!is_listed) {
        units.push_back(unit);
      }
      continue;
    }
    if (!needed.may_be_gathered) {
      break;
    }
    if (needed.is_root) {
      units.push_back(unit);
      continue;
    }
    if (needed.is_full && !is_next_iteration && !contains(stayed_, unit)) {
      break; // it will be freed before that use
    }
    if (!in_use) {
      in_use = unit;
      units.push_back(unit);
      continue;
    }
    const int64_t more = std::max(largest, needed.bytes);
    if (any && bytes + needed.bytes - more > needed.overlap_bytes) {
      break;
    }
    units.push_back(unit);
    bytes += needed.bytes;
    largest = more;
    any = true;
  }
  return units;
}

std::vector<int> GatherOrder::to_gather(
    bool in_backward,
    int in_use,
    const DescribeNeeded& describe) {
  wanted_ = look_ahead(in_backward, in_use, describe);
  std::vector<int> result;
  std::copy_if(
      wanted_.begin(),
      wanted_.end(),
      std::back_inserter(result),
      [&](int unit) { return unit != in_use && describe(unit).is_sharded; });
  return result;
}

bool GatherOrder::is_wanted(int unit) const {
  return contains(wanted_, unit);
}

std::vector<int> GatherOrder::to_free_at_end(const DescribeNeeded& describe) {
  const bool went_as_expected = orders_.position == orders_.expected.size();
  wanted_ = went_as_expected
      ? look_ahead(/*across_iterations=*/true, std::nullopt, describe)
      : std::vector<int>();
  std::vector<int> result;
  std::copy_if(
      held_.begin(), held_.end(), std::back_inserter(result), [&](int unit) {
        const NeededUnit held = describe(unit);
        return !is_wanted(unit) && !(held.is_root && held.accumulates);
      });
  return result;
}

void GatherOrder::forget(int unit) {
  free(unit);
  std::erase(wanted_, unit);
  orders_.known.erase(unit);
  std::replace(orders_.expected.begin(), orders_.expected.end(), unit, kGap);
  std::replace(orders_.recorded.begin(), orders_.recorded.end(), unit, kGap);
  for (auto& [first, order] : orders_.known) {
    std::replace(order.begin(), order.end(), unit, kGap);
  }
}

void GatherOrder::forget_orders() {
  stayed_.clear();
  wanted_.clear();
  orders_.known.clear();
  orders_.expected.clear();
  orders_.recorded.clear();
  orders_.foresees = false;
  orders_.is_iteration_ended = true;
}

} // namespace tessera::engine
