#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace gpt {

/// Tokens in a file, mapped into memory: only what is used is read, and the
/// ranks of a host share the memory.
///
/// The file: "TESSTOK1", bytes per token (2 or 4) and vocabulary as 32-bit
/// numbers, the number of tokens as a 64-bit one, then the tokens; all
/// little-endian.
class TokenFile {
 public:
  /// Throws std::runtime_error for a file that is not what write() writes.
  explicit TokenFile(const std::filesystem::path& path);

  /// Writes a temporary file and renames it: there is never a partial file.
  static void write(
      const std::filesystem::path& path,
      std::span<const int32_t> tokens,
      int64_t vocabulary);

  int64_t size() const {
    return size_;
  }
  int64_t vocabulary() const {
    return vocabulary_;
  }
  /// Copies tokens `first` to `first + to.size() - 1`.
  void read(int64_t first, std::span<int64_t> to) const;

 private:
  std::shared_ptr<const std::byte> mapping_;
  const std::byte* tokens_ = nullptr;
  int64_t size_ = 0;
  int64_t vocabulary_ = 0;
  uint32_t token_bytes_ = 0;
};

} // namespace gpt
