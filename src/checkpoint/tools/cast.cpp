#include "checkpoint/tools/cast.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "checkpoint/scalar_type.h"

namespace tessera::checkpoint {

format::ByteSpan cast(
    format::ByteSpan bytes,
    format::DType from,
    format::DType to,
    std::vector<uint8_t>& buffer) {
  const auto numel =
      static_cast<int64_t>(bytes.size()) / format::element_bytes(from);
  const auto result_bytes =
      static_cast<size_t>(numel * format::element_bytes(to));
  if (buffer.size() < result_bytes) {
    buffer.resize(result_bytes);
  }
  const at::Tensor source = at::from_blob(
      const_cast<uint8_t*>(bytes.data()), {numel}, scalar_type(from));
  at::from_blob(buffer.data(), {numel}, scalar_type(to)).copy_(source);
  return {buffer.data(), result_bytes};
}

} // namespace tessera::checkpoint
