#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {

/// Empty if the boxes, each inside a tensor of `sizes`, cover the tensor
/// exactly once; otherwise what is wrong: "4 of its 6 elements are missing".
std::string why_not_covered(
    const std::vector<int64_t>& sizes,
    const std::vector<StoredBox>& boxes);

} // namespace tessera::checkpoint
