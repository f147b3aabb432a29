#include "checkpoint/tools/cast.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "checkpoint/tools/scalar_type.h"

namespace tessera::checkpoint {

std::vector<uint8_t> cast(
    format::ByteSpan bytes,
    format::DType from,
    format::DType to) {
  const auto numel =
      static_cast<int64_t>(bytes.size()) / format::element_bytes(from);
  std::vector<uint8_t> result(
      static_cast<size_t>(numel * format::element_bytes(to)));
  const at::Tensor source = at::from_blob(
      const_cast<uint8_t*>(bytes.data()), {numel}, scalar_type(from));
  at::from_blob(result.data(), {numel}, scalar_type(to)).copy_(source);
  return result;
}

} // namespace tessera::checkpoint
