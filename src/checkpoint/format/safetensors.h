// The header of a safetensors file; see docs/formats/safetensors.md.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/random_bytes.h"

namespace tessera::format {

struct SafeTensor {
  std::string name;
  DType dtype = DType::Float32;
  std::vector<int64_t> sizes;
  uint64_t begin = 0; // of its bytes, from the end of the header
  uint64_t end = 0;

  bool operator==(const SafeTensor&) const = default;
};

struct SafetensorsHeader {
  std::vector<SafeTensor> tensors; // by `begin`; they cover the data exactly
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0; // in the file
};

/// `bytes` is the whole file; only the header is read. Uses memory in
/// proportion to what the header describes, whatever else it holds. Throws
/// FormatError.
SafetensorsHeader read_safetensors(const RandomBytes& bytes);

/// Gives `header` its order, places and data_offset, and returns the file's
/// beginning. Throws FormatError for dtypes and sizes the format cannot have.
std::string lay_out_safetensors(SafetensorsHeader* header);

} // namespace tessera::format
