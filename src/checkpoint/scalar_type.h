// Converts between the dtypes of files and those of LibTorch.
#pragma once

#include <c10/core/ScalarType.h>

#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {

/// LibTorch's name of a dtype.
inline c10::ScalarType scalar_type(format::DType dtype) {
  using format::DType;
  switch (dtype) {
    case DType::kBool:
      return c10::kBool;
    case DType::kUInt8:
      return c10::kByte;
    case DType::kInt8:
      return c10::kChar;
    case DType::kUInt16:
      return c10::kUInt16;
    case DType::kInt16:
      return c10::kShort;
    case DType::kUInt32:
      return c10::kUInt32;
    case DType::kInt32:
      return c10::kInt;
    case DType::kUInt64:
      return c10::kUInt64;
    case DType::kInt64:
      return c10::kLong;
    case DType::kFloat8E4M3FN:
      return c10::kFloat8_e4m3fn;
    case DType::kFloat8E4M3FNUZ:
      return c10::kFloat8_e4m3fnuz;
    case DType::kFloat8E5M2:
      return c10::kFloat8_e5m2;
    case DType::kFloat8E5M2FNUZ:
      return c10::kFloat8_e5m2fnuz;
    case DType::kFloat8E8M0FNU:
      return c10::kFloat8_e8m0fnu;
    case DType::kBFloat16:
      return c10::kBFloat16;
    case DType::kFloat16:
      return c10::kHalf;
    case DType::kFloat32:
      return c10::kFloat;
    case DType::kFloat64:
      return c10::kDouble;
    case DType::kComplex32:
      return c10::kComplexHalf;
    case DType::kComplex64:
      return c10::kComplexFloat;
    case DType::kComplex128:
      return c10::kComplexDouble;
  }
  return c10::ScalarType::Undefined;
}

} // namespace tessera::checkpoint
