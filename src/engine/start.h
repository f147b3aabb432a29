// Checks that all ranks begin with the same values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>

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
/// A parameter that is read from a file in parts has the digest that the file's
/// reader gives, since no rank has all of its bytes; see
/// [Note: elements overloads] in deferred/tape.h.
///
/// One 64-bit digest per parameter: XXH3 of the bytes in host memory. On a
/// device 1,024 sums of the bits, which a kernel makes in one pass, are hashed
/// on the host.
uint64_t digest_of(const at::Tensor& values);

/// A model is about to be used through `unit`. The first time, the ranks
/// compare what they began with in its units, which are among `units` (by
/// number). Throws DisagreementError on all ranks, which names the first
/// parameter that differs and whose. Collective the first time.
void begin_use(const Unit& unit, const std::map<int, Unit*>& units);

} // namespace tessera::engine
