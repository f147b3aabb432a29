// The time of a step: what is computed and what is sent, side by side.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "comm/wire_speed.h"

namespace tessera::plan {

/// How fast a rank computes and sends. By default nothing takes time.
struct Speeds {
  /// Operations per second that the model's matrix products reach.
  double flops = std::numeric_limits<double>::infinity();
  comm::WireSpeed wire;

  bool are_known() const {
    return std::isfinite(flops);
  }
};

/// Where the seconds of a step go.
struct StepTime {
  double computing = 0;
  double waiting = 0; // for the wire
  double sending = 0; // the wire is busy

  double together() const {
    return computing + waiting;
  }
  /// The part of `sending` during which the rank computes.
  double hidden() const {
    return std::max(0.0, sending - waiting);
  }
};

/// [Note: the time of a step]
///
/// There are two lanes. Operations are computed in the order of the program;
/// the wire carries one collective at a time, in the order in which they are
/// started, from the moment at which it is free. Where the engine waits for a
/// collective, computing goes on at the collective's end. So the time of a step
/// follows from the same walk as its memory: see [Note: walking through a
/// step]. Only matrix products take time: the optimizer's step, norms and
/// copies are not counted.
class Clock {
 public:
  explicit Clock(const Speeds& speeds = {}) : speeds_(speeds) {}

  void compute(double flops);
  /// Starts collectives in which each rank sends so many bytes, now or at
  /// `start`. Returns when they end.
  double send(int64_t sent_bytes, int64_t collectives = 1) {
    return send_at(now_, sent_bytes, collectives);
  }
  double send_at(double start, int64_t sent_bytes, int64_t collectives = 1);
  void wait_until(double end);

  double now() const {
    return now_;
  }
  /// Since the last reset().
  const StepTime& time() const {
    return time_;
  }
  void reset() {
    time_ = {};
  }
  /// Repeats what took place since `before` another `times` times.
  void repeat_since(const StepTime& before, int64_t times);

 private:
  Speeds speeds_;
  double now_ = 0; // of the computing lane
  double wire_free_ = 0;
  StepTime time_; // since reset()
};

} // namespace tessera::plan
