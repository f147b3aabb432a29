#pragma once

#include <filesystem>
#include <optional>

namespace gpt {

/// A lock between processes, by a file. Held until the object goes, or the
/// process, however that ends.
class FileLock {
 public:
  /// Waits until it is free. Both throw std::runtime_error if the file cannot
  /// be made or locked.
  explicit FileLock(const std::filesystem::path& path);
  /// Nothing if somebody has it.
  static std::optional<FileLock> if_free(const std::filesystem::path& path);

  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&& other) noexcept;
  ~FileLock();

 private:
  explicit FileLock(int fd) : fd_(fd) {}

  int fd_ = -1;
};

} // namespace gpt
