#include "engine/gathers.h"

#include <algorithm>
#include <exception>
#include <vector>

#include "engine/unit.h"
#include "engine/unit_memory.h"
#include "libtorch/backward_hooks.h"

namespace tessera::engine {

void Gathers::make_room(std::span<Unit* const> units) {
  const auto describe = [&](int number) {
    const Unit& held = *units_.at(number);
    const auto is_above = [&](const Unit* touched) {
      return held.contains(*touched);
    };
    return GatherOrder::HeldUnit{
        .is_touched = std::ranges::find(units, &held) != units.end(),
        .is_above = held.is_root() || std::ranges::any_of(units, is_above),
        .is_gathering = held.state() == UnitState::Gathering,
        .is_kept = held.is_pinned() || !held.options().reshard_after_forward};
  };
  for (const int number : order_.to_free(libtorch::in_backward(), describe)) {
    free(*units_.at(number));
  }
}

void Gathers::ensure_full(Unit& unit) {
  if (!libtorch::in_backward() && unit.state() != UnitState::Sharded) {
    unit.params().follow_requires_grad(); // a gather does so by itself
  }
  if (unit.state() == UnitState::Full && !unit.is_stale()) {
    if (order_.record_stayed(unit.number())) {
      gather_ahead(unit);
    }
    return;
  }
  if (unit.is_stale()) {
    free(unit);
  }
  if (unit.state() == UnitState::Gathering && !shows_shard(unit)) {
    ++probe_.counts.prefetched;
  }
  start(unit, /*ahead=*/false);
  finish(unit);
  order_.record(unit.number());
  // Only now that this gather is finished: what it needed on the way is free
  // again.
  gather_ahead(unit);
}

void Gathers::gather_ahead(const Unit& in_use) {
  for (const int number : order_.to_gather(
           libtorch::in_backward(), in_use.number(), [this](int unit) {
             return describe(unit);
           })) {
    start(*units_.at(number), /*ahead=*/true);
  }
}

GatherOrder::NeededUnit Gathers::describe(int number) const {
  const auto found = units_.find(number);
  if (found == units_.end()) { // it may have died while others' orders counted
    return {};
  }
  Unit& unit = *found->second;
  // The touch of a unit that was written since forward is an error, which names
  // the unit. Once the unit is gathered anew, only autograd would notice.
  const bool is_refused = libtorch::in_backward() && unit.is_stale();
  return {
      .is_root = unit.is_root(),
      .is_full = unit.state() == UnitState::Full,
      .is_sharded = unit.state() == UnitState::Sharded,
      .may_be_gathered = !is_refused &&
          is_worth_gathering_ahead(
              unit.groups().shard.size(), unit.options().offload),
      .accumulates = !unit.gradients().syncs(),
      .bytes = static_cast<int64_t>(full_bytes(unit)),
      .overlap_bytes = overlap_bytes(unit)};
}

void Gathers::start(Unit& unit, bool ahead) {
  if (!unit.start_gather()) {
    return;
  }
  order_.hold(unit.number());
  check_.note(OrderCheck::Event::Gather, unit.number());
  probe_.gathers(unit, ahead);
}

void Gathers::finish(Unit& unit) {
  if (unit.state() != UnitState::Gathering) {
    return;
  }
  try {
    const ScheduleProbe::Wait wait(probe_, ShardEvent::Kind::GatherWait, unit);
    unit.finish_gather();
  } catch (...) {
    free(unit); // garbage must not look Full
    throw;
  }
}

void Gathers::free(Unit& unit) {
  finish(unit); // the memory is still being written
  if (!unit.reshard()) {
    return;
  }
  order_.free(unit.number());
  forget_last(unit);
  probe_.reshards(unit);
}

void Gathers::free_used(Unit& unit) {
  if (!unit.is_root() && !order_.is_wanted(unit.number())) {
    free(unit);
  }
}

void Gathers::free_at_end() {
  for (const int number :
       order_.to_free_at_end([this](int unit) { return describe(unit); })) {
    free(*units_.at(number));
  }
  last_touched_ = nullptr;
  order_.end_iteration();
}

void Gathers::recover() {
  for (const int number : std::vector<int>(order_.held())) {
    try {
      free(*units_.at(number));
    } catch (const std::exception&) {
      // Its gather failed; the exception that brought us here says more.
    }
  }
  order_.forget_orders();
  last_touched_ = nullptr;
}

void Gathers::forget(const Unit& gone) {
  order_.forget(gone.number());
  forget_last(gone);
}

} // namespace tessera::engine
