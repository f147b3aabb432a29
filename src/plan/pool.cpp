#include "plan/pool.h"

namespace tessera::plan {
namespace {

/// As in engine/buffer_pool.cpp and engine/schedule.cpp.
constexpr int kMaxIdle = 3;
constexpr int kIdleBetweenSteps = 2;

} // namespace

void Pool::take(int64_t bytes, Kind kind) {
  const auto idle = idle_.find(bytes);
  if (idle != idle_.end() && idle->second > 0) {
    --idle->second;
    ledger_.drop(Kind::Buffers, bytes);
  }
  ledger_.add(kind, bytes);
}

void Pool::give(int64_t bytes, Kind kind) {
  ledger_.drop(kind, bytes);
  if (keeps_ && idle_[bytes] < kMaxIdle) {
    ++idle_[bytes];
    ledger_.add(Kind::Buffers, bytes);
  }
}

void Pool::trim() {
  for (auto& [bytes, count] : idle_) {
    for (; count > kIdleBetweenSteps; --count) {
      ledger_.drop(Kind::Buffers, bytes);
    }
  }
}

} // namespace tessera::plan
