// Sends tensors from the ranks that own them to all ranks.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::comm {

/// Copies the tensors of owned[r] on rank r into those of every other rank, for
/// all r at once. Ranks that share memory copy straight from tensor to tensor;
/// elsewhere small tensors are sent packed, large ones by themselves, a few at
/// a time. Collective.
void broadcast_owned(
    const Group& group,
    const std::vector<std::vector<at::Tensor>>& owned);

} // namespace tessera::comm
