#include "plan/clock.h"

#include <algorithm>

namespace tessera::plan {

void Clock::compute(double flops) {
  const double seconds = flops / speeds_.flops;
  now_ += seconds;
  time_.computing += seconds;
}

double Clock::send_at(double start, int64_t sent_bytes, int64_t collectives) {
  if (sent_bytes == 0) { // one rank, or nothing to send
    return start;
  }
  const double seconds = speeds_.wire.seconds(sent_bytes, collectives);
  wire_free_ = std::max(start, wire_free_) + seconds;
  time_.sending += seconds;
  return wire_free_;
}

void Clock::wait_until(double end) {
  if (end > now_) {
    time_.waiting += end - now_;
    now_ = end;
  }
}

void Clock::repeat_since(const StepTime& before, int64_t times) {
  const auto more = static_cast<double>(times);
  const double seconds = more * (time_.together() - before.together());
  now_ += seconds;
  wire_free_ += seconds;
  time_.computing += more * (time_.computing - before.computing);
  time_.waiting += more * (time_.waiting - before.waiting);
  time_.sending += more * (time_.sending - before.sending);
}

} // namespace tessera::plan
