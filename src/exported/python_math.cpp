#include "exported/python_math.h"

#include <tessera/error.h>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "exported/python_functions.h"

namespace tessera::exported {
namespace {

using c10::IValue;

bool is_int(const IValue& value) {
  return value.isInt() || value.isBool();
}

int64_t as_int(const IValue& value) {
  if (value.isBool()) {
    return value.toBool() ? 1 : 0;
  }
  return value.toInt();
}

[[noreturn]] void refuse_overflow() {
  raise({}, "a symbolic number is too large for 64 bits.");
}

void refuse_zero(bool is_zero) {
  if (is_zero) {
    raise({}, "a symbolic number is divided by zero.");
  }
}

void refuse_negative_shift(int64_t bits) {
  if (bits < 0) {
    raise({}, "a symbolic number is shifted by a negative number of bits.");
  }
}

template <class Compare>
IValue compare(const IValue& a, const IValue& b, Compare holds) {
  return is_int(a) && is_int(b) ? holds(as_int(a), as_int(b))
                                : holds(as_float(a), as_float(b));
}

IValue to_int(double number) {
  if (!(number >= -9.2e18 && number <= 9.2e18)) {
    refuse_overflow();
  }
  return static_cast<int64_t>(number);
}

/// torch.sym_max(int, float) is a float; Python's max() is one of the two.
IValue float_if_any(std::span<const IValue> args, const IValue& result) {
  const bool any = std::any_of(args.begin(), args.end(), [](const IValue& arg) {
    return arg.isDouble();
  });
  return any ? IValue(as_float(result)) : result;
}

} // namespace

int64_t checked_add(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) {
    refuse_overflow();
  }
  return result;
}

int64_t checked_sub(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_sub_overflow(a, b, &result)) {
    refuse_overflow();
  }
  return result;
}

int64_t checked_mul(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    refuse_overflow();
  }
  return result;
}

double as_float(const IValue& number) {
  if (number.isDouble()) {
    return number.toDouble();
  }
  return static_cast<double>(as_int(number));
}

bool as_bool(const IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().item().toBool();
  }
  return value.isDouble() ? value.toDouble() != 0 : as_int(value) != 0;
}

bool python_equal(const IValue& a, const IValue& b) {
  const auto is_number = [](const IValue& value) {
    return is_int(value) || value.isDouble();
  };
  if (is_number(a) && is_number(b)) {
    return compare(a, b, [](auto x, auto y) { return x == y; }).toBool();
  }
  if (a.isString() && b.isString()) {
    return a.toStringRef() == b.toStringRef();
  }
  return a.isNone() && b.isNone();
}

namespace python {

IValue add(Numbers args) {
  IValue sum = args[0];
  for (const IValue& next : args.subspan(1)) {
    if (is_int(sum) && is_int(next)) {
      sum = checked_add(as_int(sum), as_int(next));
    } else {
      sum = as_float(sum) + as_float(next);
    }
  }
  return sum;
}

IValue mul(Numbers args) {
  IValue product = args[0];
  for (const IValue& next : args.subspan(1)) {
    if (is_int(product) && is_int(next)) {
      product = checked_mul(as_int(product), as_int(next));
    } else {
      product = as_float(product) * as_float(next);
    }
  }
  return product;
}

IValue sub(Numbers args) {
  if (is_int(args[0]) && is_int(args[1])) {
    return checked_sub(as_int(args[0]), as_int(args[1]));
  }
  return as_float(args[0]) - as_float(args[1]);
}

IValue neg(Numbers args) {
  return is_int(args[0]) ? IValue(checked_sub(0, as_int(args[0])))
                         : -as_float(args[0]);
}

IValue pos(Numbers args) {
  return is_int(args[0]) ? IValue(as_int(args[0])) : args[0];
}

IValue floor_div(Numbers args) {
  if (is_int(args[0]) && is_int(args[1])) {
    const int64_t a = as_int(args[0]);
    const int64_t b = as_int(args[1]);
    refuse_zero(b == 0);
    if (a == std::numeric_limits<int64_t>::min() && b == -1) {
      refuse_overflow();
    }
    return a / b - static_cast<int64_t>(a % b != 0 && (a < 0) != (b < 0));
  }
  refuse_zero(as_float(args[1]) == 0);
  return std::floor(as_float(args[0]) / as_float(args[1]));
}

IValue mod(Numbers args) {
  if (is_int(args[0]) && is_int(args[1])) {
    const int64_t a = as_int(args[0]);
    const int64_t b = as_int(args[1]);
    refuse_zero(b == 0);
    if (b == -1) {
      return int64_t{0};
    }
    const int64_t rest = a % b;
    return rest + (rest != 0 && (rest < 0) != (b < 0) ? b : 0);
  }
  const double b = as_float(args[1]);
  refuse_zero(b == 0);
  const double rest = std::fmod(as_float(args[0]), b);
  return rest + (rest != 0 && (rest < 0) != (b < 0) ? b : 0.0);
}

IValue true_div(Numbers args) {
  refuse_zero(as_float(args[1]) == 0);
  return as_float(args[0]) / as_float(args[1]);
}

IValue power(Numbers args) {
  if (is_int(args[0]) && is_int(args[1]) && as_int(args[1]) >= 0) {
    const int64_t base = as_int(args[0]);
    const int64_t exponent = as_int(args[1]);
    if (base == 1 || base == -1) {
      return exponent % 2 == 0 ? int64_t{1} : base;
    }
    int64_t result = 1;
    for (int64_t i = 0; i < exponent && result != 0; ++i) {
      result = checked_mul(result, base);
    }
    return result;
  }
  return std::pow(as_float(args[0]), as_float(args[1]));
}

/// ModularIndexing(base, divisor, modulus).
IValue modular_indexing(Numbers args) {
  const IValue quotient = floor_div(args.first(2));
  const IValue pair[] = {quotient, args[2]};
  return mod(pair);
}

IValue less(Numbers args) {
  return compare(args[0], args[1], [](auto a, auto b) { return a < b; });
}

IValue less_equal(Numbers args) {
  return compare(args[0], args[1], [](auto a, auto b) { return a <= b; });
}

IValue greater(Numbers args) {
  return compare(args[0], args[1], [](auto a, auto b) { return a > b; });
}

IValue greater_equal(Numbers args) {
  return compare(args[0], args[1], [](auto a, auto b) { return a >= b; });
}

IValue equal(Numbers args) {
  return python_equal(args[0], args[1]);
}

IValue not_equal(Numbers args) {
  return !python_equal(args[0], args[1]);
}

IValue logical_and(Numbers args) {
  if (args.size() == 2 && args[0].isInt() && args[1].isInt()) {
    return args[0].toInt() & args[1].toInt();
  }
  bool all = true;
  for (const IValue& each : args) {
    all = all && as_bool(each);
  }
  return all;
}

IValue logical_or(Numbers args) {
  if (args.size() == 2 && args[0].isInt() && args[1].isInt()) {
    return args[0].toInt() | args[1].toInt();
  }
  bool any = false;
  for (const IValue& each : args) {
    any = any || as_bool(each);
  }
  return any;
}

IValue logical_not(Numbers args) {
  return !as_bool(args[0]);
}

IValue shift_left(Numbers args) {
  refuse_negative_shift(as_int(args[1]));
  const IValue two_to[] = {int64_t{2}, args[1]};
  const IValue pair[] = {args[0], power(two_to)};
  return mul(pair);
}

IValue shift_right(Numbers args) {
  refuse_negative_shift(as_int(args[1]));
  return as_int(args[0]) >> std::min(as_int(args[1]), int64_t{63});
}

IValue maximum(Numbers args) {
  IValue best = args[0];
  for (const IValue& next : args.subspan(1)) {
    const IValue pair[] = {best, next};
    best = less(pair).toBool() ? next : best;
  }
  return best;
}

IValue minimum(Numbers args) {
  IValue best = args[0];
  for (const IValue& next : args.subspan(1)) {
    const IValue pair[] = {next, best};
    best = less(pair).toBool() ? next : best;
  }
  return best;
}

IValue sym_maximum(Numbers args) {
  return float_if_any(args, maximum(args));
}

IValue sym_minimum(Numbers args) {
  return float_if_any(args, minimum(args));
}

IValue absolute(Numbers args) {
  if (!is_int(args[0])) {
    return std::abs(as_float(args[0]));
  }
  const int64_t number = as_int(args[0]);
  return number < 0 ? checked_sub(0, number) : number;
}

IValue choose(Numbers args) {
  return as_bool(args[0]) ? args[1] : args[2];
}

IValue floor_to_int(Numbers args) {
  return is_int(args[0]) ? IValue(as_int(args[0]))
                         : to_int(std::floor(as_float(args[0])));
}

IValue ceil_to_int(Numbers args) {
  return is_int(args[0]) ? IValue(as_int(args[0]))
                         : to_int(std::ceil(as_float(args[0])));
}

IValue trunc_to_int(Numbers args) {
  return is_int(args[0]) ? IValue(as_int(args[0]))
                         : to_int(std::trunc(as_float(args[0])));
}

IValue round_to_int(Numbers args) { // half to even, as Python does
  return is_int(args[0]) ? IValue(as_int(args[0]))
                         : to_int(std::nearbyint(as_float(args[0])));
}

IValue to_float(Numbers args) {
  return as_float(args[0]);
}

IValue square_root(Numbers args) {
  return std::sqrt(as_float(args[0]));
}

IValue same(Numbers args) {
  return args[0];
}

IValue sym_size(Numbers args) {
  return args[0].toTensor().size(args[1].toInt());
}

IValue sym_sizes(Numbers args) {
  return args[0].toTensor().sizes().vec();
}

IValue sym_stride(Numbers args) {
  return args[0].toTensor().stride(args[1].toInt());
}

IValue sym_numel(Numbers args) {
  return args[0].toTensor().numel();
}

IValue sym_storage_offset(Numbers args) {
  return args[0].toTensor().storage_offset();
}

} // namespace python
} // namespace tessera::exported
