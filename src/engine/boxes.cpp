#include "engine/boxes.h"

#include <functional>
#include <numeric>

namespace tessera::engine {
namespace {

/// Cuts the range [begin, end) of the block that `place` selects on the dims
/// before `dim`.
void cut(
    const Shape& shape,
    size_t dim,
    ShardedTensor::Box place,
    int64_t begin,
    int64_t end,
    std::vector<ShardedTensor::Box>& boxes) {
  const int64_t inner = std::accumulate(
      shape.begin() + static_cast<std::ptrdiff_t>(dim) + 1,
      shape.end(),
      int64_t{1},
      std::multiplies<>());
  const auto rows = [&](int64_t first, int64_t last) {
    if (first < last) {
      ShardedTensor::Box box = place;
      box.offsets[dim] = first;
      box.sizes[dim] = last - first;
      boxes.push_back(std::move(box));
    }
  };
  const auto part_of_row = [&](int64_t row, int64_t from, int64_t to) {
    ShardedTensor::Box box = place;
    box.offsets[dim] = row;
    box.sizes[dim] = 1;
    cut(shape, dim + 1, std::move(box), from, to, boxes);
  };
  const int64_t first = begin / inner;
  const int64_t last = (end - 1) / inner;
  if (begin % inner == 0 && end % inner == 0) {
    rows(first, last + 1);
  } else if (first == last) {
    part_of_row(first, begin - first * inner, end - first * inner);
  } else {
    const bool cuts_first = begin % inner != 0;
    const bool cuts_last = end % inner != 0;
    if (cuts_first) {
      part_of_row(first, begin - first * inner, inner);
    }
    rows(first + (cuts_first ? 1 : 0), last + (cuts_last ? 0 : 1));
    if (cuts_last) {
      part_of_row(last, 0, end - last * inner);
    }
  }
}

} // namespace

std::vector<ShardedTensor::Box> boxes_of(
    const Shape& shape,
    int64_t begin,
    int64_t numel) {
  std::vector<ShardedTensor::Box> boxes;
  if (numel == 0) {
    return boxes;
  }
  ShardedTensor::Box whole{std::vector<int64_t>(shape.size(), 0), shape};
  if (shape.empty()) {
    boxes.push_back(std::move(whole));
  } else {
    cut(shape, 0, std::move(whole), begin, begin + numel, boxes);
  }
  return boxes;
}

at::Tensor view_of(const at::Tensor& whole, const ShardedTensor::Box& box) {
  at::Tensor view = whole;
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    view = view.narrow(
        static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  }
  return view;
}

} // namespace tessera::engine
