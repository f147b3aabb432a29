#include "checkpoint/disk/box_tiling.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "checkpoint/format/extent.h"

namespace tessera::checkpoint {
namespace {

// [Note: boxes that tile]
//
// Add up, for each point, how many boxes hold it. The sum is 1 everywhere in
// the tensor if and only if its mixed differences are those of the tensor
// itself, and the mixed differences of a box are 1 and -1, in turn, at its
// corners. So: collect the corners with their signs, let equal points cancel,
// and see whether the tensor's own corners are left. This costs one sort of the
// corners; comparing all boxes with each other would cost the square of their
// number. Dims that no box divides are left out.

struct Corner {
  std::vector<int64_t> point;
  int64_t sign;
};

// With more dims, the corners would take far more memory than the boxes.
constexpr size_t kMaxDividedDims = 8;

std::vector<size_t> divided_dims(
    const std::vector<int64_t>& sizes,
    const std::vector<StoredBox>& boxes) {
  std::vector<size_t> dims;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const bool is_divided =
        std::any_of(boxes.begin(), boxes.end(), [&](const StoredBox& box) {
          return box.sizes[dim] != sizes[dim];
        });
    if (is_divided) {
      dims.push_back(dim);
    }
  }
  return dims;
}

void add_corners(
    const std::vector<size_t>& dims,
    const std::vector<int64_t>& offsets,
    const std::vector<int64_t>& sizes,
    int64_t sign,
    std::vector<Corner>* corners) {
  for (size_t which = 0; which < size_t{1} << dims.size(); ++which) {
    Corner corner{.point = {}, .sign = sign};
    for (size_t i = 0; i < dims.size(); ++i) {
      const bool is_end = (which >> i) & 1;
      corner.point.push_back(offsets[dims[i]] + (is_end ? sizes[dims[i]] : 0));
      corner.sign = is_end ? -corner.sign : corner.sign;
    }
    corners->push_back(std::move(corner));
  }
}

bool all_cancel(std::vector<Corner> corners) {
  std::sort(corners.begin(), corners.end(), [](const auto& a, const auto& b) {
    return a.point < b.point;
  });
  for (size_t begin = 0; begin < corners.size();) {
    int64_t sum = 0;
    size_t end = begin;
    for (; end < corners.size() && corners[end].point == corners[begin].point;
         ++end) {
      sum += corners[end].sign;
    }
    if (sum != 0) {
      return false;
    }
    begin = end;
  }
  return true;
}

} // namespace

std::string why_not_covered(
    const std::vector<int64_t>& sizes,
    const std::vector<StoredBox>& boxes) {
  const int64_t numel = format::checked_numel(sizes).value_or(-1);
  int64_t missing = numel;
  for (const auto& box : boxes) {
    if (box.numel() > missing) {
      return "its boxes overlap";
    }
    missing -= box.numel();
  }
  if (missing > 0) {
    return std::to_string(missing) + " of its " + std::to_string(numel) +
        " elements are missing";
  }
  const auto dims = divided_dims(sizes, boxes);
  if (dims.size() > kMaxDividedDims) {
    return "its boxes divide " + std::to_string(dims.size()) +
        " dims; more than " + std::to_string(kMaxDividedDims) +
        " dims are not supported";
  }
  std::vector<Corner> corners;
  corners.reserve((boxes.size() + 1) << dims.size());
  for (const auto& box : boxes) {
    add_corners(dims, box.offsets, box.sizes, 1, &corners);
  }
  if (!boxes.empty()) {
    add_corners(
        dims, std::vector<int64_t>(sizes.size(), 0), sizes, -1, &corners);
  }
  return all_cancel(std::move(corners)) ? "" : "its boxes overlap";
}

} // namespace tessera::checkpoint
