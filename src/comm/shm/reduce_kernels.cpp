#include "comm/shm/reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace tessera::comm::shm {
namespace {

/// Elements handled at a time: the accumulator stays in the first-level cache.
constexpr size_t kBlock = 1024;

template <class T>
inline constexpr bool kIsReducedPrecision =
    std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

template <class T>
using Accumulator = std::conditional_t<kIsReducedPrecision<T>, float, T>;

struct Sum {
  template <class A>
  static A combine(A a, A b) {
    if constexpr (std::is_same_v<A, bool>) {
      return a || b;
    } else if constexpr (std::is_integral_v<A>) {
      // Unsigned, where overflow wraps as it does in ATen.
      using Bits = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<Bits>(a) + static_cast<Bits>(b));
    } else {
      return a + b;
    }
  }
  template <class A>
  static A finish(A a, int) {
    return a;
  }
};

struct Avg : Sum {
  template <class A>
  static A finish(A a, int count) {
    using Real = typename c10::scalar_value_type<A>::type;
    return a / static_cast<Real>(count);
  }
};

struct Min {
  // A NaN wins, as in at::minimum. `|`, not `||`: without a branch the loop
  // becomes vector code.
  template <class A>
  static A combine(A a, A b) {
    return static_cast<bool>((b < a) | (b != b)) ? b : a;
  }
  template <class A>
  static A finish(A a, int) {
    return a;
  }
};

struct Max {
  template <class A>
  static A combine(A a, A b) {
    return static_cast<bool>((b > a) | (b != b)) ? b : a;
  }
  template <class A>
  static A finish(A a, int) {
    return a;
  }
};

template <class T, class Op>
void reduce(
    void* out,
    const void* const* inputs,
    int num_inputs,
    size_t numel) {
  using A = Accumulator<T>;
  auto* result = static_cast<T*>(out);
  A sum[kBlock];
  for (size_t begin = 0; begin < numel; begin += kBlock) {
    const size_t count = std::min(kBlock, numel - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (size_t i = 0; i < count; ++i) {
      sum[i] = static_cast<A>(first[i]);
    }
    for (int r = 1; r < num_inputs; ++r) {
      const T* next = static_cast<const T*>(inputs[r]) + begin;
      for (size_t i = 0; i < count; ++i) {
        sum[i] = Op::combine(sum[i], static_cast<A>(next[i]));
      }
    }
    for (size_t i = 0; i < count; ++i) {
      result[begin + i] = static_cast<T>(Op::finish(sum[i], num_inputs));
    }
  }
}

template <class T>
std::optional<Reduction> reduction_for(ReduceOp op) {
  constexpr bool kComplex = c10::is_complex<T>::value;
  constexpr bool kFloating =
      std::is_floating_point_v<T> || kIsReducedPrecision<T> || kComplex;
  switch (op) {
    case ReduceOp::Sum:
      return Reduction{&reduce<T, Sum>, sizeof(T)};
    case ReduceOp::Avg:
      if constexpr (kFloating) {
        return Reduction{&reduce<T, Avg>, sizeof(T)};
      }
      break;
    case ReduceOp::Min:
      if constexpr (!kComplex) {
        return Reduction{&reduce<T, Min>, sizeof(T)};
      }
      break;
    case ReduceOp::Max:
      if constexpr (!kComplex) {
        return Reduction{&reduce<T, Max>, sizeof(T)};
      }
      break;
  }
  return std::nullopt;
}

} // namespace

std::optional<Reduction> find_reduction(c10::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduction_for<float>(op);
    case c10::ScalarType::Double:
      return reduction_for<double>(op);
    case c10::ScalarType::Half:
      return reduction_for<c10::Half>(op);
    case c10::ScalarType::BFloat16:
      return reduction_for<c10::BFloat16>(op);
    case c10::ScalarType::ComplexFloat:
      return reduction_for<c10::complex<float>>(op);
    case c10::ScalarType::ComplexDouble:
      return reduction_for<c10::complex<double>>(op);
    case c10::ScalarType::Byte:
      return reduction_for<uint8_t>(op);
    case c10::ScalarType::Char:
      return reduction_for<int8_t>(op);
    case c10::ScalarType::Short:
      return reduction_for<int16_t>(op);
    case c10::ScalarType::Int:
      return reduction_for<int32_t>(op);
    case c10::ScalarType::Long:
      return reduction_for<int64_t>(op);
    case c10::ScalarType::Bool:
      return reduction_for<bool>(op);
    default:
      return std::nullopt;
  }
}

} // namespace tessera::comm::shm
