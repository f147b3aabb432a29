#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/disk/source.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_value.h"
#include "checkpoint/format/torch_file.h"

namespace tessera::checkpoint {

/// Where a tensor lies in a torch file. Throws FormatError unless `value` is a
/// tensor of this dtype and these sizes whose bytes are its elements.
Place place_of(
    const format::TorchFile& file,
    const format::Value& value,
    format::DType dtype,
    const std::vector<int64_t>& sizes);

} // namespace tessera::checkpoint
