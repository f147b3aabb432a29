// Sees every operator that receives a face or a leaf.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

namespace tessera::engine {

/// [Note: first touch]
///
/// LibTorch's C++ modules have no hooks, and users call forward() of any module
/// as they like. So Tessera attaches to the tensors: each face carries one more
/// dispatch key, which sorts above autograd. A fallback for that key is called
/// for every operator that receives a face, or a view of one (views inherit the
/// key), before anything else happens. It finds the units by the storages of
/// the arguments, has the Schedule make all of them Full together, and calls
/// the operator again without the key. Forward, backward, recomputation and
/// functions that nobody foresaw all come through here. Operators without a
/// face among their arguments never do, and pay nothing.
///
/// Leaves carry the key too. Reading a leaf needs nothing; a write is counted,
/// so that a Full unit is known to be stale.
///
/// Code that takes a tensor's address is noticed too, see
/// [Note: raw access] in comm/raw_access.h.
///
/// A write to a face is refused: it would be lost at the next reshard.
///
/// The key is one that LibTorch sets aside for tests of such wrappers. The
/// PrivateUse keys would do as well, but they change how operators are
/// decomposed, and results would not be bit-equal to the plain model's.
inline constexpr c10::DispatchKey kShardKey =
    c10::DispatchKey::TESTING_ONLY_GenericWrapper;
inline constexpr c10::DispatchKeySet kShardKeys{kShardKey};

/// Registers the fallback, once per process.
void enable_first_touch();

} // namespace tessera::engine
