#include "plan/pool.h"

namespace tessera::plan {

int64_t Pool::idle_bytes() const {
  int64_t total = 0;
  idle_.for_each([&](std::monostate, size_t bytes) {
    total += static_cast<int64_t>(bytes);
  });
  return total;
}

void Pool::take(int64_t bytes, Kind kind) {
  if (idle_.take(static_cast<size_t>(bytes))) {
    ledger_.drop(Kind::Buffers, bytes);
  }
  ledger_.add(kind, bytes);
}

void Pool::give(int64_t bytes, Kind kind) {
  ledger_.drop(kind, bytes);
  if (keeps_ && idle_.give(static_cast<size_t>(bytes), {})) {
    ledger_.add(Kind::Buffers, bytes);
  }
}

void Pool::trim() {
  const int64_t before = idle_bytes();
  idle_.trim(engine::IdleLimits::kBetweenSteps);
  ledger_.drop(Kind::Buffers, before - idle_bytes());
}

} // namespace tessera::plan
