// Gathers the state of all ranks on one rank, or describes it on all of them.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>

namespace tessera::zero {

/// On rank `to`, the entries of all ranks, which have different keys, sorted by
/// key, with tensors in host memory of their own; empty on other ranks. Large
/// tensors are sent directly to their place, a bucket of bytes at a time: rank
/// `to` needs memory for the result and one bucket, the other ranks for one
/// bucket. Collective.
StateDict gather_state(const Group& group, int to, const StateDict& own);

/// The entries of all ranks on every rank. Tensors that have dims become
/// sharded tensors whose one piece stays on the rank that has the entry, in the
/// same memory; small values, such as a number of steps, go to every rank.
/// Collective.
StateDict share_state(const Group& group, const StateDict& own);

} // namespace tessera::zero
