// How much memory a unit occupies: for reports, and for tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/unit.h"

namespace tessera::engine {

/// True where faces show the shard itself, or its cast, and nothing is ever
/// moved.
bool shows_shard(const Unit& unit);
/// Bytes of the full buffers while they have memory of their own.
size_t full_bytes(const Unit& unit);
/// Elements of full buffers that have memory now, padding included.
int64_t allocated_numel(const Unit& unit);
size_t shard_bytes(const Unit& unit);
/// Bytes of the full gradients as they are averaged, padding included.
size_t gradient_bytes(const Unit& unit);
/// What overlap may take, by the unit's options or by default.
int64_t overlap_bytes(const Unit& unit);
/// See Bundle and BundleGradients.
size_t full_bytes_now(const Unit& unit);
size_t gradient_bytes_now(const Unit& unit);

} // namespace tessera::engine
