#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera::format {

/// Kinds of elements that checkpoints hold, by torch's names.
enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat8E4M3FN,
  kFloat8E4M3FNUZ,
  kFloat8E5M2,
  kFloat8E5M2FNUZ,
  kFloat8E8M0FNU,
  kBFloat16,
  kFloat16,
  kFloat32,
  kFloat64,
  kComplex32,
  kComplex64,
  kComplex128,
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
