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
#include "libtorch/recording.h"

namespace tessera::engine {
namespace {

struct Schedules {
  Mutex mutex;
  std::map<const void*, std::weak_ptr<Schedule>> by_group
      TESSERA_GUARDED_BY(mutex);
};

/// Never destroyed: units may die in static destructors.
Schedules& schedules() {
  static auto& instance = *new Schedules;
  return instance;
}

/// Throws if an operator may not read the unit now.
void check_touch(const Unit& unit) {
  if (unit.state() == UnitState::Summoned) {
    raise(
        {.call = libtorch::in_backward() ? "backward" : "forward",
         .unit = unit.name()},
        unit.shows_summoned()
            ? "this uses parameters as they were before summon_full_params. Close the guard first."
            : "this rank kept its shard inside summon_full_params(rank0_only), and the others will not come to gather it. Use the parameters on rank 0 only, or close the guard first.");
  }
  if (libtorch::in_backward() && unit.is_stale()) {
    raise(
        {.call = "backward", .unit = unit.name()},
        "the shard was changed (by an optimizer step?) between this graph's forward and its backward. Run forward again.");
  }
}

} // namespace

Schedule::Schedule(const Group& group)
    : check_(group),
      backwards_([this] { end_backward(); }, [this] { recover(); }) {}

std::shared_ptr<Schedule> Schedule::of(const Group& group) {
  Schedules& all = schedules();
  const MutexLock lock(all.mutex);
  auto& entry = all.by_group[&group.impl()];
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
  const RecursiveMutexLock lock(mutex_);
  gathers_.order().end_iteration();
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
  const RecursiveMutexLock lock(mutex_);
  units_.erase(gone->number());
  gathers_.forget(*gone);
  reductions_.forget(*gone);
  delete gone; // gives its buffers back
}

void Schedule::touch(std::span<Unit* const> units) {
  const std::unique_lock only(touching_, std::try_to_lock);
  if (!only.owns_lock()) {
    raise(
        {.call = "forward", .unit = units.front()->name()},
        "a second thread uses this sharded model at the same time. A model belongs to one thread; give each its own, or take turns.");
  }
  const RecursiveMutexLock lock(mutex_);
  for (const Unit* unit : units) {
    libtorch::expect_in_recording(unit, unit->name());
  }
  if (!libtorch::in_backward()) {
    backwards_.note_outside();
  }
  const bool only_last = units.size() == 1 &&
      gathers_.was_last(*units.front()) &&
      units.front()->state() == UnitState::Full && !units.front()->is_stale();
  if (only_last && (!libtorch::in_backward() || !backwards_.empty())) {
    return;
  }
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  const bool begins_backward = libtorch::in_backward() && backwards_.empty();
  backwards_.enter(shared_from_this());
  for (const Unit* unit : units) {
    check_touch(*unit);
  }
  for (const Unit* unit : units) {
    begin_use(*unit, units_);
  }
  seed_per_rank();
  gathers_.make_room(units);
  for (Unit* unit : units) {
    gathers_.ensure_full(*unit);
  }
  if (begins_backward) {
    gathers_.gather_ahead(*units.back());
  }
  gathers_.note_last(*units.back());
  compare_if_due();
}

void Schedule::gather(Unit& unit) {
  const RecursiveMutexLock lock(mutex_);
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  unit.params().check_faces("unshard"); // also where it is Full already
  begin_use(unit, units_);
  gathers_.ensure_full(unit);
  unit.pin();
  compare_if_due();
}

/// A loop that only evaluates has no end of a backward.
void Schedule::compare_if_due() {
  if (libtorch::in_backward() || !check_.is_due()) {
    return;
  }
  try {
    check_.compare();
  } catch (const DisagreementError&) {
    recover();
    throw;
  }
}

void Schedule::reshard(Unit& unit) {
  const RecursiveMutexLock lock(mutex_);
  gathers_.free(unit);
}

void Schedule::exchange_orders(GatherOrder::Orders& orders) {
  const RecursiveMutexLock lock(mutex_);
  gathers_.order().exchange_orders(orders);
}

bool Schedule::holds_gradients() {
  const RecursiveMutexLock lock(mutex_);
  return std::any_of(units_.begin(), units_.end(), [](const auto& entry) {
    return entry.second->gradients().holds_any();
  });
}

void Schedule::summon(Unit& unit, const SummonOptions& options) {
  const RecursiveMutexLock lock(mutex_);
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  unit.params().check_faces("summon_full_params");
  begin_use(unit, units_);
  unit.params().follow_requires_grad();
  gathers_.finish(unit);
  if (unit.options().param_dtype || unit.is_stale()) {
    gathers_.free(unit);
  }
  unit.summon(options);
  check_.note(OrderCheck::Event::Summon, unit.number());
  gathers_.forget_last(unit);
  probe_.summons(unit);
}

void Schedule::end_summon(Unit& unit) {
  const RecursiveMutexLock lock(mutex_);
  const SummonEnd end = unit.end_summon();
  if (end.changed) {
    gathers_.free(unit);
  }
  if (end.failure) {
    std::rethrow_exception(end.failure);
  }
}

} // namespace tessera::engine
