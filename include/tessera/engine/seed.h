#pragma once

#include <tessera/api.h>

#include <cstdint>

namespace tessera {

/// Seeds LibTorch's generators, those of GPUs too, so that every rank draws the
/// same numbers: models that are built next begin with equal values. The first
/// use of a sharded model, the construction of a DistributedDataParallel, or
/// seed_per_rank() then gives each rank numbers of its own, so that dropout and
/// data differ from rank to rank. Call it with the same seed on every rank,
/// after init(). Not collective.
TESSERA_API void seed(uint64_t seed);

/// After this call each rank draws random numbers of its own, derived from the
/// seed that was given to seed() and the rank in the world. Does nothing if
/// that has happened already, if seed() was not called, or if the generators
/// were seeded by other means since. Not collective.
TESSERA_API void seed_per_rank();

} // namespace tessera
