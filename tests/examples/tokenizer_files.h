#pragma once

#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

namespace gpt {

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// A file of tokenizers/.
inline std::filesystem::path file_of(const std::string& name) {
  return std::filesystem::path(TESSERA_TOKENIZERS) / (name + ".json");
}

/// What the exception says that `work` throws.
inline std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

} // namespace gpt
