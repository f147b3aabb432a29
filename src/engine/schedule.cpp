// The forward half of the Schedule, and what the user asks for.
#include "engine/schedule.h"

#include <tessera/engine/seed.h>
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "engine/start.h"

namespace tessera::engine {
namespace {

/// Throws if an operator may not read the unit now.
void check_touch(const Unit& unit) {
  if (unit.state() == UnitState::Summoned) {
    raise(
        {.call = in_backward() ? "backward" : "forward", .unit = unit.name()},
        unit.shows_summoned()
            ? "this uses parameters as they were before summon_full_params. Close the guard first."
            : "this rank kept its shard inside summon_full_params(rank0_only), and the others will not come to gather it. Use the parameters on rank 0 only, or close the guard first.");
  }
  if (in_backward() && unit.is_stale()) {
    raise(
        {.call = "backward", .unit = unit.name()},
        "the shard was changed (by an optimizer step?) between this graph's forward and its backward. Run forward again.");
  }
}

/// Else there is nothing to wait for, only memory to hold.
bool is_worth_gathering_ahead(const Unit& unit) {
  return unit.groups().shard.size() > 1 || unit.options().offload;
}

} // namespace

Schedule::Schedule(const Group& group)
    : check_(group),
      backwards_([this] { end_backward(); }, [this] { recover(); }) {}

std::shared_ptr<Schedule> Schedule::of(const Group& group) {
  // Never destroyed: units may die in static destructors.
  static auto& schedules = *new std::map<const void*, std::weak_ptr<Schedule>>;
  static auto& mutex = *new std::mutex;
  const std::scoped_lock lock(mutex);
  auto& entry = schedules[&group.impl()];
  auto schedule = entry.lock();
  if (!schedule) {
    schedule = std::make_shared<Schedule>(group);
    entry = schedule;
  }
  return schedule;
}

std::shared_ptr<Unit> Schedule::add_unit(
    std::string name,
    int number,
    const std::vector<NamedParam>& params,
    const Groups& groups,
    const UnitOptions& options) {
  const std::scoped_lock lock(mutex_);
  order_.end_iteration();
  check_.forget_events();
  const auto schedule = shared_from_this();
  const std::shared_ptr<Unit> unit(
      new Unit(std::move(name), number, groups, options, schedule),
      [schedule](Unit* gone) { schedule->forget(gone); });
  units_.emplace(number, unit.get());
  unit->shard(params, pool_);
  return unit;
}

void Schedule::forget(Unit* gone) {
  const std::scoped_lock lock(mutex_);
  units_.erase(gone->number());
  order_.forget(gone->number());
  for (Unit** reduced : {&reductions_.in_flight, &reductions_.over_copies}) {
    if (*reduced == gone) {
      *reduced = nullptr;
    }
  }
  std::erase_if(reductions_.finished, [gone](const auto& finished) {
    return finished.unit == gone;
  });
  if (last_touched_ == gone) {
    last_touched_ = nullptr;
  }
  delete gone; // gives its buffers back
}

void Schedule::touch(std::span<Unit* const> units) {
  const std::unique_lock only(touching_, std::try_to_lock);
  if (!only.owns_lock()) {
    raise(
        {.call = "forward", .unit = units.front()->name()},
        "a second thread uses this sharded model at the same time. A model belongs to one thread; give each its own, or take turns.");
  }
  const std::scoped_lock lock(mutex_);
  if (!in_backward()) {
    backwards_.note_outside();
  }
  const bool only_last = units.size() == 1 && units.front() == last_touched_ &&
      units.front()->state() == UnitState::Full && !units.front()->is_stale();
  if (only_last && (!in_backward() || !backwards_.empty())) {
    return;
  }
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  const bool begins_backward = in_backward() && backwards_.empty();
  backwards_.enter(shared_from_this());
  for (const Unit* unit : units) {
    check_touch(*unit);
  }
  for (const Unit* unit : units) {
    begin_use(*unit, units_);
  }
  seed_per_rank();
  make_room(units);
  for (Unit* unit : units) {
    ensure_full(*unit);
  }
  if (begins_backward) {
    gather_ahead();
  }
  last_touched_ = units.back();
}

void Schedule::gather(Unit& unit) {
  const std::scoped_lock lock(mutex_);
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  unit.params().check_faces("unshard"); // also where it is Full already
  begin_use(unit, units_);
  ensure_full(unit);
  unit.pin();
}

void Schedule::make_room(std::span<Unit* const> units) {
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
  for (const int number : order_.to_free(in_backward(), describe)) {
    reshard(*units_.at(number));
  }
}

void Schedule::ensure_full(Unit& unit) {
  if (!in_backward() && unit.state() != UnitState::Sharded) {
    unit.params().follow_requires_grad(); // a gather does so by itself
  }
  if (unit.state() == UnitState::Full && !unit.is_stale()) {
    if (order_.record_stayed(unit.number())) {
      gather_ahead();
    }
    return;
  }
  if (unit.is_stale()) {
    reshard(unit);
  }
  if (unit.state() == UnitState::Gathering && !unit.shows_shard()) {
    ++probe_.counts.prefetched;
  }
  start_gather(unit, /*ahead=*/false);
  finish_gather(unit);
  order_.record(unit.number());
  // Only now that this gather is finished: what it needed on the way is free
  // again.
  gather_ahead();
  if (!in_backward() && check_.is_due()) {
    try {
      check_.compare();
    } catch (const DisagreementError&) {
      recover();
      throw;
    }
  }
}

/// Starts the gather that followed last time.
void Schedule::gather_ahead() {
  const auto next = order_.foreseen();
  const auto found = next ? units_.find(*next) : units_.end();
  if (found == units_.end()) { // it may have died while others' orders counted
    return;
  }
  Unit& unit = *found->second;
  // The touch of a unit that was written since forward is an error, which names
  // the unit. Once the unit is gathered anew, only autograd would notice.
  const bool is_refused = in_backward() && unit.is_stale();
  if (is_worth_gathering_ahead(unit) && !is_refused) {
    start_gather(unit, /*ahead=*/true);
  }
}

void Schedule::start_gather(Unit& unit, bool ahead) {
  if (!unit.start_gather()) {
    return;
  }
  order_.hold(unit.number());
  check_.note(OrderCheck::Event::Gather, unit.number());
  probe_.gathers(unit, ahead);
}

void Schedule::finish_gather(Unit& unit) {
  if (unit.state() != UnitState::Gathering) {
    return;
  }
  try {
    const ScheduleProbe::Wait wait(probe_, ShardEvent::Kind::GatherWait, unit);
    unit.finish_gather();
  } catch (...) {
    reshard(unit); // garbage must not look Full
    throw;
  }
}

void Schedule::reshard(Unit& unit) {
  const std::scoped_lock lock(mutex_);
  finish_gather(unit); // the memory is still being written
  if (!unit.reshard()) {
    return;
  }
  order_.free(unit.number());
  if (last_touched_ == &unit) {
    last_touched_ = nullptr;
  }
  probe_.reshards(unit);
}

void Schedule::exchange_orders(GatherOrder::Orders& orders) {
  const std::scoped_lock lock(mutex_);
  order_.exchange_orders(orders);
}

void Schedule::pause_checks(bool on) {
  const std::scoped_lock lock(mutex_);
  check_.pause(on);
}

bool Schedule::holds_gradients() {
  const std::scoped_lock lock(mutex_);
  return std::any_of(units_.begin(), units_.end(), [](const auto& entry) {
    return entry.second->gradients().holds_any();
  });
}

void Schedule::drop_idle_buffers() {
  const std::scoped_lock lock(mutex_);
  pool_.trim(0);
}

void Schedule::summon(Unit& unit, const SummonOptions& options) {
  const std::scoped_lock lock(mutex_);
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  unit.params().check_faces("summon_full_params");
  begin_use(unit, units_);
  unit.params().follow_requires_grad();
  finish_gather(unit);
  if (unit.options().param_dtype || unit.is_stale()) {
    reshard(unit);
  }
  unit.summon(options);
  check_.note(OrderCheck::Event::Summon, unit.number());
  if (last_touched_ == &unit) {
    last_touched_ = nullptr;
  }
  probe_.summons(unit);
}

void Schedule::end_summon(Unit& unit) {
  const std::scoped_lock lock(mutex_);
  const SummonEnd end = unit.end_summon();
  if (end.changed) {
    reshard(unit);
  }
  if (end.failure) {
    std::rethrow_exception(end.failure);
  }
}

} // namespace tessera::engine
