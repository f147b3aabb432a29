// Converts between the dtypes of files and those of LibTorch.
#pragma once

#include <c10/core/ScalarType.h>

#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {

/// LibTorch's name of a dtype.
inline c10::ScalarType scalar_type(format::DType dtype) {
  using format::DType;
  switch (dtype) {
    case DType::Bool:
      return c10::kBool;
    case DType::UInt8:
      return c10::kByte;
    case DType::Int8:
      return c10::kChar;
    case DType::UInt16:
      return c10::kUInt16;
    case DType::Int16:
      return c10::kShort;
    case DType::UInt32:
      return c10::kUInt32;
    case DType::Int32:
      return c10::kInt;
    case DType::UInt64:
      return c10::kUInt64;
    case DType::Int64:
      return c10::kLong;
    case DType::Float8E4M3FN:
      return c10::kFloat8_e4m3fn;
    case DType::Float8E4M3FNUZ:
      return c10::kFloat8_e4m3fnuz;
    case DType::Float8E5M2:
      return c10::kFloat8_e5m2;
    case DType::Float8E5M2FNUZ:
      return c10::kFloat8_e5m2fnuz;
    case DType::Float8E8M0FNU:
      return c10::kFloat8_e8m0fnu;
    case DType::BFloat16:
      return c10::kBFloat16;
    case DType::Float16:
      return c10::kHalf;
    case DType::Float32:
      return c10::kFloat;
    case DType::Float64:
      return c10::kDouble;
    case DType::Complex32:
      return c10::kComplexHalf;
    case DType::Complex64:
      return c10::kComplexFloat;
    case DType::Complex128:
      return c10::kComplexDouble;
  }
  return c10::ScalarType::Undefined;
}

} // namespace tessera::checkpoint
