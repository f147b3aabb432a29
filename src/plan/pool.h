// The bytes of an engine::BufferPool.
#pragma once

#include <cstdint>
#include <variant>

#include "engine/idle_buffers.h"
#include "plan/ledger.h"

namespace tessera::plan {

class Pool {
 public:
  /// `keeps`: idle buffers stay in the pool, as on the CPU. On other devices
  /// memory goes back to its allocator.
  Pool(Ledger& ledger, bool keeps) : ledger_(ledger), keeps_(keeps) {}

  void take(int64_t bytes, Kind kind);
  void give(int64_t bytes, Kind kind);
  /// What the end of a backward does.
  void trim();

 private:
  int64_t idle_bytes() const;

  Ledger& ledger_;
  const bool keeps_;
  engine::IdleBuffers<std::monostate> idle_;
};

} // namespace tessera::plan
