#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera::format {

/// Kinds of elements that checkpoints hold, by torch's names.
enum class DType : uint8_t {
  Bool,
  UInt8,
  Int8,
  UInt16,
  Int16,
  UInt32,
  Int32,
  UInt64,
  Int64,
  Float8E4M3FN,
  Float8E4M3FNUZ,
  Float8E5M2,
  Float8E5M2FNUZ,
  Float8E8M0FNU,
  BFloat16,
  Float16,
  Float32,
  Float64,
  Complex32,
  Complex64,
  Complex128,
};
constexpr int kNumDTypes = 21;

struct DTypeInfo {
  DType dtype;
  int64_t element_bytes;
  std::string_view torch_name; // "float32", of torch.float32
  /// "FloatStorage"; empty for dtypes that torch stores untyped.
  std::string_view storage_name;
  /// "F32"; empty if safetensors has no name for the dtype.
  std::string_view safetensors_name;
};

const DTypeInfo& info(DType dtype);

inline int64_t element_bytes(DType dtype) {
  return info(dtype).element_bytes;
}

std::optional<DType> dtype_of_torch_name(std::string_view name);
std::optional<DType> dtype_of_storage_name(std::string_view name);
std::optional<DType> dtype_of_safetensors_name(std::string_view name);

} // namespace tessera::format
