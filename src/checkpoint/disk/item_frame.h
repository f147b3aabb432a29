// Torch files in memory, made by LibTorch, with a hole for a tensor's bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::checkpoint {

/// The file of a row-major tensor is `head`, its bytes, `tail`.
struct TensorFrame {
  std::string head;
  uint64_t data_bytes = 0;
  std::string tail;
};

TensorFrame frame_tensor(
    format::DType dtype,
    const std::vector<int64_t>& sizes);

/// The file of a value without tensors.
std::string value_item(const format::Value& value);

} // namespace tessera::checkpoint
