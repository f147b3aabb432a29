// The backward half of the Schedule, see [Note: schedule].
#include <ATen/core/grad_mode.h>

#include <exception>
#include <unordered_set>
#include <utility>

#include "engine/schedule.h"

namespace tessera::engine {
namespace {

/// Buffers of one size that a forward needs: the touched unit's and the next.
constexpr size_t kIdleBetweenSteps = 2;

} // namespace

std::vector<at::Tensor> Schedule::take_gradients(
    Unit& unit,
    std::vector<at::Tensor>&& gradients,
    Destination destination) {
  const size_t count = gradients.size();
  backwards_.enter(shared_from_this());
  unit.check_faces("backward");
  finish_reductions(); // the buffer of the unit before serves these gradients
  const bool any = unit.add_gradients(std::move(gradients));
  if (!unit.is_root()) {
    reshard(unit);
  }
  if (any && unit.syncs_gradients()) {
    start_reduction(unit);
  }
  if (destination == Destination::Leaves) {
    unit.hold_hooks();
    return std::vector<at::Tensor>(count);
  }
  const ScheduleProbe::Wait wait(probe_, ShardEvent::Kind::ReduceWait, unit);
  return unit.finish_reduction_apart();
}

void Schedule::start_reduction(Unit& unit) {
  check_.note(OrderCheck::Event::Reduction, unit.number());
  reductions_.in_flight.push_back(&unit); // to be dropped if this throws
  probe_.reduces(unit);
  unit.start_reduction();
}

/// The one place where averages get to the leaves.
void Schedule::finish_reductions() {
  while (!reductions_.in_flight.empty()) {
    Unit& oldest = *reductions_.in_flight.front();
    reductions_.in_flight.pop_front();
    if (!oldest.is_reducing()) {
      continue; // the engine got its average
    }
    const ScheduleProbe::Wait wait(
        probe_, ShardEvent::Kind::ReduceWait, oldest);
    auto [used, failure] = oldest.finish_reduction();
    reductions_.finished.emplace_back(&oldest, std::move(used));
    if (failure) {
      check_.note_failure(std::move(failure));
    }
  }
}

void Schedule::end_backward() {
  at::NoGradGuard no_grad;
  finish_reductions();
  reduce_what_waits();
  for (const int number : std::vector<int>(order_.held())) {
    reshard(*units_.at(number));
  }
  for (const auto& [number, unit] : units_) {
    unit->release_hooks();
  }
  pool_.trim(kIdleBetweenSteps);
  last_touched_ = nullptr;
  order_.end_iteration();
  compare_order_and_use();
}

/// Gradients of earlier backwards without synchronisation whose units this
/// backward did not use: they belong to this step all the same.
void Schedule::reduce_what_waits() {
  std::unordered_set<const Unit*> models;
  for (const auto& [unit, used] : reductions_.finished) {
    models.insert(&unit->root());
  }
  for (const auto& [number, unit] : units_) {
    if (unit->syncs_gradients() && unit->has_waiting_gradients() &&
        models.contains(&unit->root())) {
      start_reduction(*unit);
      finish_reductions();
    }
  }
}

/// Throws on all ranks unless they did the same. Gradients of parameters that
/// no rank used become undefined again.
void Schedule::compare_order_and_use() {
  const auto reduced = std::exchange(reductions_.finished, {});
  std::vector<bool> used;
  for (const auto& [unit, by_position] : reduced) {
    used.insert(used.end(), by_position.begin(), by_position.end());
  }
  const auto used_by_any = check_.compare_with_use(used);
  if (!used_by_any) {
    return;
  }
  probe_.counts.use_exchanges += check_.is_alone() ? 0 : 1;
  auto next = used_by_any->begin();
  for (const auto& [unit, by_position] : reduced) {
    const auto end = next + static_cast<std::ptrdiff_t>(by_position.size());
    unit->drop_unused_gradients(std::vector<bool>(next, end));
    next = end;
  }
}

void Schedule::recover() {
  check_.reset();
  reductions_ = {};
  for (const auto& [number, unit] : units_) {
    unit->drop_reduction();
    unit->release_hooks();
  }
  for (const int number : std::vector<int>(order_.held())) {
    try {
      reshard(*units_.at(number));
    } catch (const std::exception&) {
      // Its gather failed; the exception that brought us here says more.
    }
  }
  order_.forget_orders();
  last_touched_ = nullptr;
}

} // namespace tessera::engine
