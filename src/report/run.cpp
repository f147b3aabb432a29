#include "report/run.h"

#include <numeric>

namespace tessera::report {

double Step::memory_total() const {
  return std::accumulate(memory.begin(), memory.end(), 0.0);
}

double Attempt::seconds() const {
  if (began && last_seen && *last_seen >= *began) {
    return *last_seen - *began;
  }
  return step_seconds;
}

bool Attempt::ended_well() const {
  return end_reason == "finished" || end_reason == "stopped";
}

} // namespace tessera::report
