// The shape of a tensor, with sizes as numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/format/dtype.h"

namespace tessera::plan {

struct TensorShape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  format::DType dtype = format::DType::Float32;

  int64_t numel() const; // throws TooLarge
  int64_t bytes() const; // of its elements; throws TooLarge
  /// Whether it can have a gradient.
  bool is_differentiable() const;
  bool is_contiguous() const;
};

/// Contiguous.
TensorShape shape_of(std::vector<int64_t> sizes, format::DType dtype);
/// The same sizes and strides in another dtype.
TensorShape in_dtype(TensorShape shape, format::DType dtype);
/// What an operator on elements gives for `shape`: dense, with dimensions in
/// the order of its strides. (Contiguous, if it has gaps.)
TensorShape dense_like(const TensorShape& shape);

/// Whether dimensions `begin` up to `end` can be made one without a copy.
bool can_merge(const TensorShape& shape, size_t begin, size_t end);

/// Whether the elements can be seen with other sizes without a copy: what
/// reshape() finds out.
bool can_view(const TensorShape& shape, const std::vector<int64_t>& sizes);

} // namespace tessera::plan
