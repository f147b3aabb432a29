// What the tests of formats share.
#pragma once

#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/format_error.h"

namespace tessera::format {

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  if (!file.flush()) {
    throw std::runtime_error("cannot write " + path);
  }
}

inline std::string golden(const std::string& name) {
  return read_file(TESSERA_FORMAT_GOLDENS "/" + name);
}

/// The message of the FormatError that `read` throws, or "accepted".
inline std::string refusal(const std::function<void()>& read) {
  try {
    read();
  } catch (const FormatError& error) {
    return error.what();
  }
  return "accepted";
}

} // namespace tessera::format
