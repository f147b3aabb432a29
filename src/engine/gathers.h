// Which units are full: gathers and frees them.
#pragma once

#include <map>
#include <span>

#include "engine/gather_order.h"
#include "engine/order_check.h"
#include "engine/probe.h"

namespace tessera::engine {

class Unit;

/// The full parameters of a group's units: carries out what GatherOrder
/// decides.
///
/// Thread safety: that of the Schedule, which owns it.
class Gathers {
 public:
  /// All of them outlive this object.
  Gathers(
      const std::map<int, Unit*>& units,
      OrderCheck& check,
      ScheduleProbe& probe)
      : units_(units), check_(check), probe_(probe) {}

  /// Frees what a touch of these units does not need.
  void make_room(std::span<Unit* const> units);
  /// Returns with the unit Full, and gathers of others started.
  void ensure_full(Unit& unit);
  /// Starts the gathers that followed last time, while the unit is in use.
  void gather_ahead(const Unit& in_use);
  /// Waits for a gather in flight.
  void finish(Unit& unit);
  /// Frees what was gathered, unless the unit is summoned.
  void free(Unit& unit);
  /// Backward is through with the unit.
  void free_used(Unit& unit);
  /// A backward has ended.
  void free_at_end();
  /// After an exception. Forgets all orders.
  void recover();

  /// A touch of this unit was the last one, and it was not freed since.
  bool was_last(const Unit& unit) const {
    return last_touched_ == &unit;
  }
  void note_last(const Unit& unit) {
    last_touched_ = &unit;
  }
  /// The next touch is looked at whatever it touches.
  void forget_last(const Unit& unit) {
    last_touched_ = last_touched_ == &unit ? nullptr : last_touched_;
  }

  GatherOrder& order() {
    return order_;
  }
  void forget(const Unit& gone);

 private:
  void start(Unit& unit, bool ahead);
  GatherOrder::NeededUnit describe(int number) const;

  const std::map<int, Unit*>& units_; // that live, by number
  OrderCheck& check_;
  ScheduleProbe& probe_;
  GatherOrder order_;
  const Unit* last_touched_ = nullptr;
};

} // namespace tessera::engine
