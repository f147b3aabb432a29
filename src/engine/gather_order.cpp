#include "engine/gather_order.h"

#include <algorithm>
#include <utility>

namespace tessera::engine {

void GatherOrder::free(int unit) {
  std::erase(held_, unit);
  std::erase(stayed_, unit);
}

void GatherOrder::begin_iteration(int first) {
  if (!recorded_.empty() && recorded_.front() != kGap) {
    const int known_by = recorded_.front();
    known_[known_by] = std::move(recorded_);
  }
  recorded_.clear();
  const auto known = known_.find(first);
  expected_ = known == known_.end() ? std::vector<int>() : known->second;
  foresees_ = !expected_.empty();
  position_ = 0;
  is_iteration_ended_ = false;
}

void GatherOrder::record(int unit) {
  if (is_iteration_ended_) {
    begin_iteration(unit);
  }
  if (recorded_.size() < kMaxRecord) {
    recorded_.push_back(unit);
  }
  foresees_ =
      foresees_ && position_ < expected_.size() && expected_[position_] == unit;
  ++position_;
}

bool GatherOrder::record_stayed(int unit) {
  if (std::erase(stayed_, unit) == 0) {
    return false;
  }
  record(unit);
  return true;
}

std::optional<int> GatherOrder::foreseen() const {
  if (is_iteration_ended_ || !foresees_ || position_ >= expected_.size() ||
      expected_[position_] == kGap) {
    return std::nullopt;
  }
  return expected_[position_];
}

void GatherOrder::forget(int unit) {
  free(unit);
  known_.erase(unit);
  std::replace(expected_.begin(), expected_.end(), unit, kGap);
  std::replace(recorded_.begin(), recorded_.end(), unit, kGap);
  for (auto& [first, order] : known_) {
    std::replace(order.begin(), order.end(), unit, kGap);
  }
}

void GatherOrder::forget_orders() {
  stayed_.clear();
  known_.clear();
  expected_.clear();
  recorded_.clear();
  foresees_ = false;
  is_iteration_ended_ = true;
}

} // namespace tessera::engine
