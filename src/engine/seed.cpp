#include <tessera/comm/init.h>
#include <tessera/engine/seed.h>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <optional>

#include "base/mutex.h"

namespace tessera {
namespace {

Mutex seed_mutex;
/// Until each rank has its own.
std::optional<uint64_t> shared_seed TESSERA_GUARDED_BY(seed_mutex);

/// SplitMix64: nearby seeds give unrelated streams.
uint64_t scramble(uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

} // namespace

void seed(uint64_t seed) {
  const MutexLock lock(seed_mutex);
  at::manual_seed(seed);
  shared_seed = seed;
}

void seed_per_rank() {
  const MutexLock lock(seed_mutex);
  if (!shared_seed) {
    return;
  }
  const uint64_t seed = *shared_seed;
  shared_seed.reset();
  const auto generator = at::globalContext().defaultGenerator(at::kCPU);
  if (generator.current_seed() ==
      seed) { // otherwise somebody has seeded it since
    at::manual_seed(
        scramble(scramble(seed) + static_cast<uint64_t>(world().rank())));
  }
}

} // namespace tessera
