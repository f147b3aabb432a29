#include "checkpoint/tools/tensor_reader.h"

#include <algorithm>

#include "checkpoint/disk/read_region.h"
#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {

TensorReader::TensorReader(const Source& source)
    : source_(source), blocks_(source) {}

void TensorReader::turn_to(const StoredTensor& tensor) {
  if (tensor_ != &tensor) {
    tensor_ = &tensor;
    places_.assign(tensor.boxes.size(), std::nullopt);
  }
}

const Place& TensorReader::place_of(size_t box) {
  if (!places_[box]) {
    places_[box] = source_.locate(*tensor_, tensor_->boxes[box]);
  }
  return *places_[box];
}

void TensorReader::each_piece(
    const StoredTensor& tensor,
    const TensorBox& region,
    const Take& take) {
  turn_to(tensor);
  if (region.numel() > 0) {
    split(region, take);
  }
}

format::ByteSpan TensorReader::read(
    const StoredTensor& tensor,
    const TensorBox& region) {
  turn_to(tensor);
  return read_part(region);
}

// Rows along the first dim that has more than one come one after another.
void TensorReader::split(const TensorBox& region, const Take& take) {
  const int64_t element = format::element_bytes(tensor_->dtype);
  const int64_t most = static_cast<int64_t>(kPieceBytes) / element;
  const int64_t numel = region.numel();
  if (numel <= most) {
    take(read_part(region), region);
    return;
  }
  size_t dim = 0;
  while (region.sizes[dim] == 1) {
    ++dim;
  }
  const int64_t rows = region.sizes[dim];
  const int64_t rows_at_once = std::max<int64_t>(1, most / (numel / rows));
  for (int64_t begin = 0; begin < rows; begin += rows_at_once) {
    TensorBox part = region;
    part.offsets[dim] += begin;
    part.sizes[dim] = std::min(rows_at_once, rows - begin);
    split(part, take);
  }
}

format::ByteSpan TensorReader::read_part(const TensorBox& region) {
  const int64_t element = format::element_bytes(tensor_->dtype);
  const auto bytes = static_cast<size_t>(region.numel() * element);
  if (piece_.size() < bytes) {
    piece_.resize(bytes);
  }
  std::vector<int64_t> strides(region.sizes.size());
  int64_t stride = element;
  for (size_t dim = strides.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= region.sizes[dim];
  }
  for (size_t i = 0; i < tensor_->boxes.size(); ++i) {
    const auto part = intersect(region, tensor_->boxes[i]);
    if (!part) {
      continue;
    }
    int64_t to = 0;
    for (size_t dim = 0; dim < strides.size(); ++dim) {
      to += (part->offsets[dim] - region.offsets[dim]) * strides[dim];
    }
    read_region(
        blocks_,
        *tensor_,
        tensor_->boxes[i],
        place_of(i),
        part->offsets,
        part->sizes,
        piece_.data() + to,
        strides);
  }
  return {piece_.data(), bytes};
}

} // namespace tessera::checkpoint
