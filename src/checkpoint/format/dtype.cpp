#include "checkpoint/format/dtype.h"

#include <array>

namespace tessera::format {
namespace {

// In the order of the enum.
constexpr std::array<DTypeInfo, kNumDTypes> kTable = {{
    {DType::Bool, 1, "bool", "BoolStorage", "BOOL"},
    {DType::UInt8, 1, "uint8", "ByteStorage", "U8"},
    {DType::Int8, 1, "int8", "CharStorage", "I8"},
    {DType::UInt16, 2, "uint16", "", "U16"},
    {DType::Int16, 2, "int16", "ShortStorage", "I16"},
    {DType::UInt32, 4, "uint32", "", "U32"},
    {DType::Int32, 4, "int32", "IntStorage", "I32"},
    {DType::UInt64, 8, "uint64", "", "U64"},
    {DType::Int64, 8, "int64", "LongStorage", "I64"},
    {DType::Float8E4M3FN, 1, "float8_e4m3fn", "", "F8_E4M3"},
    {DType::Float8E4M3FNUZ, 1, "float8_e4m3fnuz", "", "F8_E4M3FNUZ"},
    {DType::Float8E5M2, 1, "float8_e5m2", "", "F8_E5M2"},
    {DType::Float8E5M2FNUZ, 1, "float8_e5m2fnuz", "", "F8_E5M2FNUZ"},
    {DType::Float8E8M0FNU, 1, "float8_e8m0fnu", "", "F8_E8M0"},
    {DType::BFloat16, 2, "bfloat16", "BFloat16Storage", "BF16"},
    {DType::Float16, 2, "float16", "HalfStorage", "F16"},
    {DType::Float32, 4, "float32", "FloatStorage", "F32"},
    {DType::Float64, 8, "float64", "DoubleStorage", "F64"},
    {DType::Complex32, 4, "complex32", "", ""},
    {DType::Complex64, 8, "complex64", "ComplexFloatStorage", "C64"},
    {DType::Complex128, 16, "complex128", "ComplexDoubleStorage", ""},
}};

constexpr bool in_order() {
  for (size_t i = 0; i < kTable.size(); ++i) {
    if (static_cast<size_t>(kTable[i].dtype) != i) {
      return false;
    }
  }
  return true;
}
static_assert(in_order());

std::optional<DType> find(
    std::string_view DTypeInfo::*field,
    std::string_view name) {
  for (const auto& row : kTable) {
    if (!name.empty() && row.*field == name) {
      return row.dtype;
    }
  }
  return std::nullopt;
}

} // namespace

const DTypeInfo& info(DType dtype) {
  return kTable[static_cast<size_t>(dtype)];
}

std::optional<DType> dtype_of_torch_name(std::string_view name) {
  return find(&DTypeInfo::torch_name, name);
}

std::optional<DType> dtype_of_storage_name(std::string_view name) {
  return find(&DTypeInfo::storage_name, name);
}

std::optional<DType> dtype_of_safetensors_name(std::string_view name) {
  return find(&DTypeInfo::safetensors_name, name);
}

} // namespace tessera::format
