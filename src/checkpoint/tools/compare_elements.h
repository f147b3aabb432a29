// Elements of two tensors, one by one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {

struct Tolerance {
  bool is_exact = true; // every bit counts
  bool equal_nan = false; // but not those of NaN
  double rtol = 0;
  double atol = 0;
};

struct ElementDifference {
  int64_t index = 0; // in the flat tensor
  std::string a;
  std::string b;
};

/// Collects the differences between two tensors, whose pieces come in order.
class ElementComparison {
 public:
  ElementComparison(format::DType a, format::DType b, Tolerance tolerance);

  /// Takes pieces with the same number of elements.
  void add(format::ByteSpan a, format::ByteSpan b);

  int64_t num_different() const {
    return num_different_;
  }
  const std::vector<ElementDifference>& first() const {
    return first_;
  }
  /// The largest difference; NaN if one of the elements is NaN.
  double max_abs() const {
    return max_abs_;
  }
  /// |a - b| / max(|a|, |b|).
  double max_rel() const {
    return max_rel_;
  }

 private:
  template <class Number>
  void add_numbers(
      format::ByteSpan a,
      format::ByteSpan b,
      const Number* numbers_a,
      const Number* numbers_b,
      int64_t count);
  void add_block(format::ByteSpan a, format::ByteSpan b, int64_t count);

  const format::DType dtype_a_;
  const format::DType dtype_b_;
  const Tolerance tolerance_;
  int64_t seen_ = 0;
  int64_t num_different_ = 0;
  double max_abs_ = 0;
  double max_rel_ = 0;
  std::vector<ElementDifference> first_;
};

} // namespace tessera::checkpoint
