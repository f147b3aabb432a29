// A part of a stored tensor, copied into memory of any strides.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/disk/block_reader.h"
#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {

/// Copies the part of `box` of `tensor` that begins at `begin` (in the tensor)
/// and has `sizes` to `to`, whose strides are in bytes. `place` is that of the
/// box.
void read_region(
    BlockReader& reader,
    const StoredTensor& tensor,
    const StoredBox& box,
    const Place& place,
    const std::vector<int64_t>& begin,
    const std::vector<int64_t>& sizes,
    uint8_t* to,
    const std::vector<int64_t>& strides);

} // namespace tessera::checkpoint
