#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {

/// The elements of `bytes` in another dtype, as LibTorch converts them, in
/// memory of `buffer`.
format::ByteSpan cast(
    format::ByteSpan bytes,
    format::DType from,
    format::DType to,
    std::vector<uint8_t>& buffer);

} // namespace tessera::checkpoint
