// What is different about the units of a model while a captured step runs.
#pragma once

#include <memory>
#include <vector>

#include "engine/gather_order.h"
#include "engine/schedule.h"
#include "engine/unit.h"

namespace tessera::train {

/// As long as it lives, ranks compare nothing: see [Note: captured steps].
class ChecksPaused {
 public:
  explicit ChecksPaused(const std::vector<std::shared_ptr<engine::Unit>>& units)
      : units_(units) {
    set(true);
  }
  ~ChecksPaused() {
    set(false);
  }
  ChecksPaused(const ChecksPaused&) = delete;
  ChecksPaused& operator=(const ChecksPaused&) = delete;

 private:
  void set(bool on) {
    for (const auto& unit : units_) {
      unit->schedule().check().pause(on);
    }
  }

  const std::vector<std::shared_ptr<engine::Unit>>& units_;
};

/// As long as it lives, gathers are foreseen as in steps before.
class OrdersOfSteps {
 public:
  OrdersOfSteps(
      const std::vector<std::shared_ptr<engine::Unit>>& units,
      engine::GatherOrder::Orders& orders)
      : units_(units), orders_(orders) {
    exchange();
  }
  ~OrdersOfSteps() {
    exchange();
  }
  OrdersOfSteps(const OrdersOfSteps&) = delete;
  OrdersOfSteps& operator=(const OrdersOfSteps&) = delete;

 private:
  void exchange() {
    if (!units_.empty()) { // they have one schedule, or nothing is captured
      units_.front()->schedule().exchange_orders(orders_);
    }
  }

  const std::vector<std::shared_ptr<engine::Unit>>& units_;
  engine::GatherOrder::Orders& orders_;
};

} // namespace tessera::train
