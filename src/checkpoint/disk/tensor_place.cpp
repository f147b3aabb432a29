#include "checkpoint/disk/tensor_place.h"

#include <string>

#include "checkpoint/format/format_error.h"

namespace tessera::checkpoint {
namespace {

using format::FormatError;

std::string text_of(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  }
  return text + "]";
}

} // namespace

Place place_of(
    const format::TorchFile& file,
    const format::Value& value,
    format::DType dtype,
    const std::vector<int64_t>& sizes) {
  const auto* box = value.get<format::Box<format::Tensor>>();
  if (!box) {
    throw FormatError("expected a tensor, found " + std::string(value.kind()));
  }
  const format::Tensor& tensor = **box;
  if (tensor.dtype != dtype) {
    throw FormatError(
        "a tensor of " + std::string(format::info(tensor.dtype).torch_name) +
        ", " + std::string(format::info(dtype).torch_name) + " is promised");
  }
  if (tensor.sizes != sizes) {
    throw FormatError(
        "a tensor of sizes " + text_of(tensor.sizes) + ", " + text_of(sizes) +
        " is promised");
  }
  if (tensor.conj || tensor.neg) {
    throw format::UnsupportedFormat(
        "a tensor that is conjugated or negated when it is read. Save tensor.resolve_conj().resolve_neg().");
  }
  const auto& storage = file.storages.at(tensor.storage.key);
  return {
      .file = 0,
      .offset = storage.offset +
          static_cast<uint64_t>(tensor.offset * format::element_bytes(dtype)),
      .strides = tensor.strides};
}

} // namespace tessera::checkpoint
