#include "checkpoint/tools/compare_elements.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstdio>
#include <cstring>

#include "checkpoint/scalar_type.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kFirst = 3;
constexpr int64_t kBlockElements = 1 << 18;

at::Tensor as_numbers(
    format::ByteSpan bytes,
    format::DType dtype,
    int64_t count,
    bool complex) {
  return at::from_blob(
             const_cast<uint8_t*>(bytes.data()), {count}, scalar_type(dtype))
      .to(complex ? at::kComplexDouble : at::kDouble);
}

std::string text_of(double number) {
  std::array<char, 40> text;
  std::snprintf(text.data(), text.size(), "%.9g", number);
  return text.data();
}

std::string text_of(std::complex<double> number) {
  return text_of(number.real()) + (number.imag() < 0 ? "" : "+") +
      text_of(number.imag()) + "j";
}

bool is_nan(double number) {
  return std::isnan(number);
}

bool is_nan(std::complex<double> number) {
  return is_nan(number.real()) || is_nan(number.imag());
}

// NaN wins, and stays.
double larger(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

} // namespace

ElementComparison::ElementComparison(
    format::DType a,
    format::DType b,
    Tolerance tolerance)
    : dtype_a_(a), dtype_b_(b), tolerance_(tolerance) {}

void ElementComparison::add(format::ByteSpan a, format::ByteSpan b) {
  const auto bytes_a = format::element_bytes(dtype_a_);
  const auto bytes_b = format::element_bytes(dtype_b_);
  const int64_t count = static_cast<int64_t>(a.size()) / bytes_a;
  for (int64_t begin = 0; begin < count; begin += kBlockElements) {
    const int64_t part = std::min(kBlockElements, count - begin);
    const auto cut = [&](format::ByteSpan bytes, int64_t element) {
      return bytes.subspan(
          static_cast<size_t>(begin * element),
          static_cast<size_t>(part * element));
    };
    add_block(cut(a, bytes_a), cut(b, bytes_b), part);
  }
}

void ElementComparison::add_block(
    format::ByteSpan a,
    format::ByteSpan b,
    int64_t count) {
  if (dtype_a_ == dtype_b_ && std::memcmp(a.data(), b.data(), a.size()) == 0) {
    seen_ += count;
    return;
  }
  const bool complex = c10::isComplexType(scalar_type(dtype_a_)) ||
      c10::isComplexType(scalar_type(dtype_b_));
  const at::Tensor numbers_a = as_numbers(a, dtype_a_, count, complex);
  const at::Tensor numbers_b = as_numbers(b, dtype_b_, count, complex);
  if (complex) {
    using Number = std::complex<double>;
    add_numbers(
        a,
        b,
        static_cast<const Number*>(numbers_a.const_data_ptr()),
        static_cast<const Number*>(numbers_b.const_data_ptr()),
        count);
  } else {
    add_numbers(
        a,
        b,
        numbers_a.const_data_ptr<double>(),
        numbers_b.const_data_ptr<double>(),
        count);
  }
  seen_ += count;
}

template <class Number>
void ElementComparison::add_numbers(
    format::ByteSpan a,
    format::ByteSpan b,
    const Number* numbers_a,
    const Number* numbers_b,
    int64_t count) {
  const auto element = static_cast<size_t>(format::element_bytes(dtype_a_));
  for (int64_t i = 0; i < count; ++i) {
    const Number x = numbers_a[i];
    const Number y = numbers_b[i];
    const size_t at = static_cast<size_t>(i) * element;
    const double abs = x == y ? 0 : std::abs(x - y);
    const bool are_nan = is_nan(x) && is_nan(y);
    const bool is_same = tolerance_.is_exact
        ? (tolerance_.equal_nan && are_nan) ||
            std::memcmp(a.data() + at, b.data() + at, element) == 0
        : x == y || are_nan ||
            abs <= tolerance_.atol + tolerance_.rtol * std::abs(y);
    if (is_same) {
      continue;
    }
    ++num_different_;
    max_abs_ = larger(max_abs_, abs);
    const double scale = std::max(std::abs(x), std::abs(y));
    max_rel_ = larger(max_rel_, abs == 0 ? 0 : abs / scale);
    if (first_.size() < kFirst) {
      first_.push_back({.index = seen_ + i, .a = text_of(x), .b = text_of(y)});
    }
  }
}

} // namespace tessera::checkpoint
