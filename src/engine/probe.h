// What tests see of a Schedule; nothing else reads it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

namespace tessera::engine {

class Unit;

/// What a Schedule did. Where nothing had to be moved (one rank that computes
/// in the shard's dtype, or keeps the cast shard) nothing is counted.
struct ScheduleCounts {
  int64_t gathers = 0;
  int64_t prefetched = 0; // gathers that were started before a touch
  int64_t reductions = 0;
  int64_t reshards = 0;
  int64_t summons = 0;
  int64_t use_exchanges = 0; // about parameters that a rank did not use
};

struct ShardEvent {
  enum class Kind {
    Gather, // a full buffer is being filled
    GatherWait, // the thread waited for a gather
    Reshard, // a full buffer was freed
    Reduce, // gradients are being averaged
    ReduceWait, // the thread waited for a reduction
    Summon,
  };
  Kind kind;
  const Unit& unit;
  int64_t bytes = 0; // of full parameters, or of full gradients
  bool ahead = false; // Gather: started before a touch
  bool in_backward = false;
  std::chrono::nanoseconds waited{0}; // the two Waits
};

/// Called on the thread that runs the model, in the middle of it: be brief and
/// touch no parameter.
using Observer = std::function<void(const ShardEvent&)>;

/// Counts what a Schedule does, and tells the observer, where a test has set
/// one.
struct ScheduleProbe {
  ScheduleCounts counts;
  Observer observer;

  void gathers(const Unit& unit, bool ahead);
  void reshards(const Unit& unit);
  void reduces(const Unit& unit);
  void summons(const Unit& unit);
  void tell(const ShardEvent& event) const;

  /// Tells the observer how long this object lived.
  class Wait {
   public:
    Wait(const ScheduleProbe& probe, ShardEvent::Kind kind, const Unit& unit);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    const ScheduleProbe& probe_;
    const ShardEvent::Kind kind_;
    const Unit& unit_;
    std::chrono::steady_clock::time_point start_;
  };
};

} // namespace tessera::engine
