#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {

/// The elements of `bytes` in another dtype, as LibTorch converts them.
std::vector<uint8_t> cast(
    format::ByteSpan bytes,
    format::DType from,
    format::DType to);

} // namespace tessera::checkpoint
