#include "engine/layout.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace tessera::engine {
namespace {

/// The full buffer is summed as 32-bit integers, which 4 elements of any dtype
/// are a whole number of; a few more suit vector instructions.
constexpr int64_t kWholeUnit = 16;

int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

int64_t numel_of(const Shape& shape) {
  return std::accumulate(
      shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t rows_of(const Shape& shape) {
  return shape.empty() ? 1 : shape.front();
}

} // namespace

Layout::Layout(Kind kind, std::vector<Shape> shapes, int num_ranks)
    : Layout(kind, std::move(shapes), num_ranks, Alignment{}) {}

Layout::Layout(
    Kind kind,
    std::vector<Shape> shapes,
    int num_ranks,
    Alignment alignment)
    : kind_(kind),
      shapes_(std::move(shapes)),
      num_ranks_(num_ranks),
      alignment_(alignment) {
  for (const Shape& shape : shapes_) {
    numels_.push_back(numel_of(shape));
  }
  switch (kind_) {
    case Kind::Flat:
      lay_out_flat();
      break;
    case Kind::Dim0:
      lay_out_dim0();
      break;
  }
}

void Layout::lay_out_flat() {
  int64_t end = 0;
  for (int64_t numel : numels_) {
    full_offsets_.push_back(round_up(end, alignment_.param));
    end = full_offsets_.back() + numel;
  }
  shard_numel_ =
      round_up((end + num_ranks_ - 1) / num_ranks_, alignment_.shard);
  full_numel_ = shard_numel_ * num_ranks_;
}

void Layout::lay_out_dim0() {
  for (size_t param = 0; param < shapes_.size(); ++param) {
    const int64_t rows = rows_of(shapes_[param]);
    const int64_t row_numel = rows == 0 ? 0 : numels_[param] / rows;
    const int64_t chunk = (rows + num_ranks_ - 1) / num_ranks_ * row_numel;
    chunk_numels_.push_back(chunk);
    chunk_offsets_.push_back(shard_numel_);
    shard_numel_ = round_up(shard_numel_ + chunk, alignment_.param);
    full_offsets_.push_back(full_numel_);
    full_numel_ = round_up(full_numel_ + numels_[param], alignment_.param);
  }
  travel_ = Travel::Chunks;
  // A sum sends each byte twice.
  const int64_t whole_numel = round_up(full_numel_, kWholeUnit);
  if (num_ranks_ > 1 && shard_numel_ * num_ranks_ > 2 * whole_numel) {
    travel_ = Travel::Whole;
    full_numel_ = whole_numel;
  }
}

Run Layout::run(size_t param, int rank) const {
  const int64_t numel = numels_[param];
  if (kind_ == Kind::Dim0) {
    const int64_t chunk = chunk_numels_[param];
    const int64_t begin = std::min(numel, chunk * rank);
    const int64_t end = std::min(numel, chunk * (rank + 1));
    return {begin, chunk_offsets_[param], end - begin};
  }
  const int64_t shard_begin = shard_numel_ * rank;
  const int64_t param_begin = full_offsets_[param];
  const int64_t begin = std::max(param_begin, shard_begin);
  const int64_t end = std::min(param_begin + numel, shard_begin + shard_numel_);
  if (begin >= end) {
    return {};
  }
  return {begin - param_begin, begin - shard_begin, end - begin};
}

Shape Layout::local_shape(size_t param, int rank) const {
  const Run part = run(param, rank);
  const Shape& shape = shapes_[param];
  if (num_ranks_ == 1) {
    return shape;
  }
  if (kind_ == Kind::Flat) {
    return {part.numel};
  }
  if (shape.empty()) {
    return part.numel == 0 ? Shape{0} : Shape{};
  }
  Shape local = shape;
  const int64_t row_numel =
      shape.front() == 0 ? 0 : numels_[param] / shape.front();
  local.front() = row_numel == 0 ? 0 : part.numel / row_numel;
  return local;
}

} // namespace tessera::engine
