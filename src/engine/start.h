// Checks that all ranks begin with the same values.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string_view>

namespace tessera::engine {

class Unit;

/// [Note: equal starts]
///
/// A unit keeps one part of the values that each rank had. If the ranks had
/// different values, the model is made of parts of different models, and
/// nothing later can tell. So a unit takes a digest of each whole parameter
/// when it cuts the parameter, and the ranks compare these digests once, when a
/// unit of the model is first used. A parameter that was written before that,
/// because state was loaded into it, is left out: the values that it began with
/// are gone.
///
/// A parameter that is read from a file in parts has the digest that the file's
/// reader gives, since no rank has all of its bytes; see
/// [Note: elements overloads] in deferred/tape.h.
///
/// One 64-bit digest per parameter: XXH3 of the bytes in host memory; on a
/// device, digest_by_sums().
uint64_t digest_of(const at::Tensor& values);
/// The bits of `flat`, summed by kernels and hashed on the host: 1,024 sums of
/// elements that follow one another, and 1,024 of every 1,024th element, so
/// that elements which change places show. `flat` has 1,024 elements at least.
uint64_t digest_by_sums(const at::Tensor& flat);

/// Whether all ranks have the same digest. What travels does not grow with the
/// number of ranks. Collective.
bool is_same_on_all(
    uint64_t digest,
    const Group& group,
    std::string_view label);

/// A model is about to be used through `unit`. The first time, the ranks
/// compare what they began with in its units, which are among `units` (by
/// number). Throws DisagreementError on all ranks, which names the first
/// parameter that differs and whose. Collective the first time.
void begin_use(const Unit& unit, const std::map<int, Unit*>& units);

} // namespace tessera::engine
