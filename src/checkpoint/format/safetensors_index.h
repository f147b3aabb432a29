// model.safetensors.index.json: which file has which tensor.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::format {

struct SafetensorsIndex {
  std::map<std::string, std::string> files; // by tensor's name, in the folder
  std::optional<uint64_t> total_bytes;

  bool operator==(const SafetensorsIndex&) const = default;
};

/// Throws FormatError, also for files that are not in the index's folder.
SafetensorsIndex read_safetensors_index(std::string_view text);

std::string write_safetensors_index(const SafetensorsIndex& index);

} // namespace tessera::format
