// State of many ranks on one of them, or known to all of them.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>

namespace tessera::zero {

/// On rank `to` the entries of all ranks, which have different keys, sorted by
/// key, with tensors in host memory that nobody else has; empty elsewhere.
/// Large tensors travel straight to their place, a bucket of bytes at a time:
/// `to` needs memory for the result and one bucket, the others for a bucket.
/// Collective.
StateDict gather_state(const Group& group, int to, const StateDict& own);

/// The entries of all ranks on every rank. Tensors that have dims become
/// sharded ones, whose one piece is with the rank that has the entry, in the
/// memory where it is; what is small, such as a number of steps, goes to
/// everybody. Collective.
StateDict share_state(const Group& group, const StateDict& own);

} // namespace tessera::zero
