// Checks that all ranks begin with the same values.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace tessera::engine {

class Unit;

/// [Note: equal starts]
///
/// A unit keeps one part of the values that each rank had. If the ranks had
/// different values, the model is made of parts of different models, and
/// nothing later can tell. So a unit takes a digest of each whole parameter
/// when it cuts the parameter, and the ranks compare these digests once, when a
/// unit of the model is first used. A unit that was written before that,
/// because state was loaded into it, is left out: the values that it began with
/// are gone.
///
/// One 64-bit digest per parameter: XXH3 of the bytes in host memory. On a
/// device 1,024 sums of the bits, which a kernel makes in one pass, are hashed
/// on the host.
uint64_t digest_of(const at::Tensor& values);

/// Compares the values that the ranks of `group` began with in these units, the
/// same units in the same order on all ranks. Throws DisagreementError on all
/// ranks, which names the first parameter that differs and whose. Collective.
void compare_starts(std::span<Unit* const> units, const Group& group);

} // namespace tessera::engine
