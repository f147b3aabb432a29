#pragma once

#include <filesystem>
#include <optional>

namespace gpt {

/// A lock between processes, by a file. Held until the object is destroyed or
/// the process ends, in whatever way.
class FileLock {
 public:
  /// Waits until the lock is free. Both functions throw std::runtime_error if
  /// the file cannot be created or locked.
  explicit FileLock(const std::filesystem::path& path);
  /// Returns nothing if another process has the lock.
  static std::optional<FileLock> if_free(const std::filesystem::path& path);

  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&& other) noexcept;
  ~FileLock();

 private:
  explicit FileLock(int fd) : fd_(fd) {}

  int fd_ = -1;
};

} // namespace gpt
