#include "plan/clock.h"

#include <algorithm>

namespace tessera::plan {

void Clock::compute(double flops) {
  const double seconds = flops / speeds_.flops;
  now_ += seconds;
  computing_ += seconds;
}

double Clock::send_at(double start, int64_t sent_bytes, int64_t collectives) {
  if (sent_bytes == 0) { // one rank
    return start;
  }
  const double seconds = speeds_.wire.seconds(sent_bytes, collectives);
  wire_free_ = std::max(start, wire_free_) + seconds;
  sending_ += seconds;
  return wire_free_;
}

void Clock::wait_until(double end) {
  now_ = std::max(now_, end);
}

StepTime Clock::time() const {
  return {
      .together = now_ - began_, .computing = computing_, .sending = sending_};
}

void Clock::reset() {
  began_ = now_;
  computing_ = 0;
  sending_ = 0;
}

void Clock::repeat_since(const StepTime& before, int64_t times) {
  const StepTime after = time();
  const auto more = static_cast<double>(times);
  now_ += more * (after.together - before.together);
  computing_ += more * (after.computing - before.computing);
  sending_ += more * (after.sending - before.sending);
  wire_free_ = std::min(wire_free_, now_);
}

} // namespace tessera::plan
