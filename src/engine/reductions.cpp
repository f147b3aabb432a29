#include "engine/reductions.h"

#include <utility>

#include "engine/unit.h"
#include "engine/unit_memory.h"

namespace tessera::engine {

void Reductions::make_room(const Unit& unit) {
  carry_out(order_.make_room(
      unit.number(),
      static_cast<int64_t>(gradient_bytes(unit)),
      overlap_bytes(unit)));
}

void Reductions::start(Unit& unit) {
  const Groups& groups = unit.groups();
  check_.note(OrderCheck::Event::Reduction, unit.number());
  order_.start( // to be dropped if this throws
      unit.number(),
      static_cast<int64_t>(gradient_bytes(unit)),
      groups.replicate.valid() && groups.shard.size() > 1);
  probe_.reduces(unit);
  unit.gradients().start_reduction();
}

void Reductions::finish() {
  carry_out(order_.finish());
}

void Reductions::carry_out(const std::vector<ReductionOrder::Advance>& steps) {
  for (const auto& [number, to] : steps) {
    const auto found = units_.find(number);
    if (found == units_.end() || !found->second->gradients().is_reducing()) {
      order_.forget(number); // dead, or autograd took the average itself
      continue;
    }
    Unit& unit = *found->second;
    if (to == ReductionOrder::Advance::To::Copies && go_on_to_copies(unit)) {
      continue;
    }
    order_.forget(number);
    take_average(unit);
  }
}

bool Reductions::go_on_to_copies(Unit& unit) {
  const ScheduleProbe::Wait wait(probe_, ShardEvent::Kind::ReduceWait, unit);
  return unit.gradients().go_on_to_copies();
}

/// The one place where averages get to the leaves.
void Reductions::take_average(Unit& unit) {
  const ScheduleProbe::Wait wait(probe_, ShardEvent::Kind::ReduceWait, unit);
  auto [used, failure] = unit.gradients().finish_reduction();
  finished_.push_back({&unit, std::move(used)});
  if (failure) {
    check_.note_failure(std::move(failure));
  }
}

void Reductions::forget(const Unit& gone) {
  order_.forget(gone.number());
  std::erase_if(finished_, [&](const Finished& finished) {
    return finished.unit == &gone;
  });
}

void Reductions::clear() {
  order_ = {};
  finished_.clear();
}

} // namespace tessera::engine
