// engine::BufferPool, as bytes: memory of full and gradient buffers, kept for
// the next unit.
#pragma once

#include <cstdint>
#include <map>

#include "plan/ledger.h"

namespace tessera::plan {

class Pool {
 public:
  /// `keeps`: on the CPU. Elsewhere memory goes back to its allocator.
  Pool(Ledger& ledger, bool keeps) : ledger_(ledger), keeps_(keeps) {}

  void take(int64_t bytes, Kind kind);
  void give(int64_t bytes, Kind kind);
  /// What a backward's end does.
  void trim();

 private:
  Ledger& ledger_;
  const bool keeps_;
  std::map<int64_t, int> idle_; // by size
};

} // namespace tessera::plan
