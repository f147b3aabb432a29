// Which tensors of an owner travel together in one broadcast. Knows no
// LibTorch: broadcast_owned() and `tessera plan` share this policy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::comm {

/// For each broadcast the positions in `bytes` of its tensors, in the order in
/// which broadcasts are sent. Large tensors travel alone; small ones are
/// packed.
std::vector<std::vector<size_t>> pack_broadcasts(
    const std::vector<int64_t>& bytes);

} // namespace tessera::comm
