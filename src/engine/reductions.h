// Gradients on their way from a backward to the leaves.
#pragma once

#include <map>
#include <vector>

#include "engine/order_check.h"
#include "engine/probe.h"
#include "engine/reduction_order.h"

namespace tessera::engine {

class Unit;

/// The reductions of one backward: carries out what ReductionOrder decides.
/// Whatever is finished is finished here.
///
/// Thread safety: that of the Schedule, which owns it.
class Reductions {
 public:
  struct Finished {
    Unit* unit;
    std::vector<bool> used; // by position, see UnitGradients
  };

  /// All of them outlive this object.
  Reductions(
      const std::map<int, Unit*>& units,
      OrderCheck& check,
      ScheduleProbe& probe)
      : units_(units), check_(check), probe_(probe) {}

  /// Call it before the unit takes gradients.
  void make_room(const Unit& unit);
  void start(Unit& unit);
  /// Waits for all that are under way.
  void finish();

  /// Those that ended since clear(), in order.
  const std::vector<Finished>& finished() const {
    return finished_;
  }
  void forget(const Unit& gone);
  void clear();

 private:
  void carry_out(const std::vector<ReductionOrder::Advance>& steps);
  bool go_on_to_copies(Unit& unit);
  void take_average(Unit& unit);

  const std::map<int, Unit*>& units_; // that live, by number
  OrderCheck& check_;
  ScheduleProbe& probe_;
  ReductionOrder order_;
  std::vector<Finished> finished_;
};

} // namespace tessera::engine
