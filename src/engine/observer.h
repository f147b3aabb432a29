// Events of units, for code that counts or draws them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

namespace tessera::engine {

class Unit;

struct ShardEvent {
  enum class Kind {
    Gather, // a full buffer is being filled
    GatherWait, // somebody had to wait for that
    Reshard, // a full buffer was freed
    Reduce, // gradients are being averaged
    ReduceWait,
    Summon,
  };
  Kind kind;
  const Unit& unit;
  int64_t bytes = 0; // of full parameters, or of full gradients
  bool ahead = false; // Gather: started before the parameters were needed
  bool in_backward = false;
  std::chrono::nanoseconds waited{0}; // the two Waits
};

/// Called on the thread that runs the model, in the middle of it: it must be
/// fast and must not touch parameters.
using Observer = std::function<void(const ShardEvent&)>;

} // namespace tessera::engine
