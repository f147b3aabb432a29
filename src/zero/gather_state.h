// State of many ranks on one of them.
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

} // namespace tessera::zero
