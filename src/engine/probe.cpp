#include "engine/probe.h"

#include "engine/unit_memory.h"
#include "libtorch/backward_hooks.h"

namespace tessera::engine {

void ScheduleProbe::tell(const ShardEvent& event) const {
  if (observer) {
    observer(event);
  }
}

void ScheduleProbe::gathers(const Unit& unit, bool ahead) {
  const auto bytes = static_cast<int64_t>(full_bytes(unit));
  if (bytes == 0) {
    return; // it shows the shard
  }
  ++counts.gathers;
  tell(
      {.kind = ShardEvent::Kind::Gather,
       .unit = unit,
       .bytes = bytes,
       .ahead = ahead,
       .in_backward = libtorch::in_backward()});
}

void ScheduleProbe::reshards(const Unit& unit) {
  if (shows_shard(unit)) {
    return;
  }
  ++counts.reshards;
  tell(
      {.kind = ShardEvent::Kind::Reshard,
       .unit = unit,
       .in_backward = libtorch::in_backward()});
}

void ScheduleProbe::reduces(const Unit& unit) {
  if (unit.groups().all.size() == 1) {
    return;
  }
  ++counts.reductions;
  tell(
      {.kind = ShardEvent::Kind::Reduce,
       .unit = unit,
       .bytes = static_cast<int64_t>(gradient_bytes(unit)),
       .in_backward = libtorch::in_backward()});
}

void ScheduleProbe::summons(const Unit& unit) {
  ++counts.summons;
  tell({.kind = ShardEvent::Kind::Summon, .unit = unit});
}

ScheduleProbe::Wait::Wait(
    const ScheduleProbe& probe,
    ShardEvent::Kind kind,
    const Unit& unit)
    : probe_(probe), kind_(kind), unit_(unit) {
  if (probe_.observer) {
    start_ = std::chrono::steady_clock::now();
  }
}

ScheduleProbe::Wait::~Wait() {
  if (probe_.observer) {
    probe_.tell(
        {.kind = kind_,
         .unit = unit_,
         .in_backward = libtorch::in_backward(),
         .waited = std::chrono::steady_clock::now() - start_});
  }
}

} // namespace tessera::engine
