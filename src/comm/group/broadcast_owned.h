// From the owners of tensors to everybody.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::comm {

/// Gives every rank what rank r has in the tensors of owned[r], for all r at
/// once. Ranks of one host copy straight from one tensor into
/// the other; elsewhere small tensors travel packed, large ones by themselves,
/// a few at a time. Collective.
void broadcast_owned(
    const Group& group,
    const std::vector<std::vector<at::Tensor>>& owned);

} // namespace tessera::comm
