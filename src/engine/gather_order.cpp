#include "engine/gather_order.h"

#include <algorithm>
#include <utility>

namespace tessera::engine {

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

std::optional<int> GatherOrder::foreseen() const {
  if (orders_.is_iteration_ended || !orders_.foresees ||
      orders_.position >= orders_.expected.size() ||
      orders_.expected[orders_.position] == kGap) {
    return std::nullopt;
  }
  return orders_.expected[orders_.position];
}

void GatherOrder::forget(int unit) {
  free(unit);
  orders_.known.erase(unit);
  std::replace(orders_.expected.begin(), orders_.expected.end(), unit, kGap);
  std::replace(orders_.recorded.begin(), orders_.recorded.end(), unit, kGap);
  for (auto& [first, order] : orders_.known) {
    std::replace(order.begin(), order.end(), unit, kGap);
  }
}

void GatherOrder::forget_orders() {
  stayed_.clear();
  orders_.known.clear();
  orders_.expected.clear();
  orders_.recorded.clear();
  orders_.foresees = false;
  orders_.is_iteration_ended = true;
}

} // namespace tessera::engine
