#include "plan/activations/shape.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/checked.h"
#include "plan/setup.h"

namespace tessera::plan {
namespace {

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = times(strides[i], std::max<int64_t>(sizes[i], 1));
  }
  return strides;
}

} // namespace

int64_t TensorShape::numel() const {
  int64_t result = 1;
  for (const int64_t size : sizes) {
    result = times(result, size);
  }
  return result;
}

int64_t TensorShape::bytes() const {
  return times(numel(), format::element_bytes(dtype));
}

bool TensorShape::is_differentiable() const {
  return is_floating(dtype) || dtype == format::DType::Complex32 ||
      dtype == format::DType::Complex64 || dtype == format::DType::Complex128;
}

bool TensorShape::is_contiguous() const {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && strides[i] != expected) {
      return false;
    }
    expected = times(expected, std::max<int64_t>(sizes[i], 1));
  }
  return true;
}

TensorShape shape_of(std::vector<int64_t> sizes, format::DType dtype) {
  TensorShape shape{.sizes = std::move(sizes), .strides = {}, .dtype = dtype};
  shape.strides = contiguous_strides(shape.sizes);
  return shape;
}

TensorShape in_dtype(TensorShape shape, format::DType dtype) {
  shape.dtype = dtype;
  return shape;
}

TensorShape dense_like(const TensorShape& shape) {
  std::vector<size_t> order(shape.sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return shape.strides[a] > shape.strides[b];
  });
  TensorShape result = shape_of(shape.sizes, shape.dtype);
  int64_t stride = 1;
  bool is_expanded = false;
  for (size_t i = order.size(); i-- > 0;) {
    const size_t dim = order[i];
    is_expanded =
        is_expanded || (shape.strides[dim] == 0 && shape.sizes[dim] > 1);
    result.strides[dim] = stride;
    stride = times(stride, std::max<int64_t>(shape.sizes[dim], 1));
  }
  return is_expanded ? shape_of(shape.sizes, shape.dtype) : result;
}

bool can_merge(const TensorShape& shape, size_t begin, size_t end) {
  size_t last = end; // the dimension before with more than one element
  for (size_t i = end; i-- > begin;) {
    if (shape.sizes[i] == 1) {
      continue;
    }
    if (last != end &&
        shape.strides[i] != times(shape.strides[last], shape.sizes[last])) {
      return false;
    }
    last = i;
  }
  return true;
}

/// Dimensions are consumed from the end, in groups of equal products.
bool can_view(const TensorShape& shape, const std::vector<int64_t>& sizes) {
  size_t old_end = shape.sizes.size();
  size_t new_end = sizes.size();
  if (shape.numel() == 0 || shape.is_contiguous()) {
    return true;
  }
  while (old_end > 0 && new_end > 0) {
    size_t old_begin = old_end - 1;
    size_t new_begin = new_end - 1;
    int64_t old_count = shape.sizes[old_begin];
    int64_t new_count = sizes[new_begin];
    while (old_count != new_count) {
      if (old_count < new_count && old_begin > 0) {
        old_count = times(old_count, shape.sizes[--old_begin]);
      } else if (new_count < old_count && new_begin > 0) {
        new_count = times(new_count, sizes[--new_begin]);
      } else {
        return true; // sizes that do not fit are refused elsewhere
      }
    }
    if (!can_merge(shape, old_begin, old_end)) {
      return false;
    }
    old_end = old_begin;
    new_end = new_begin;
  }
  return true;
}

} // namespace tessera::plan
