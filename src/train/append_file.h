// A file that is only ever appended to, by a run that must not fail because of
// it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace tessera::train {

/// What is appended is there completely or not at all, but for a process that
/// is killed inside of the write: each call is one write at the end of the
/// file, and a write that a full disk cut short is removed. The first error
/// causes a warning and closes the file.
class AppendFile {
 public:
  /// Creates the file and its folders if they do not exist. Warnings begin with
  /// `owner`.
  AppendFile(const std::filesystem::path& path, std::string owner);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  bool is_open() const {
    return fd_ >= 0;
  }
  /// Does nothing if the file is closed.
  void append(std::string_view bytes);
  /// Removes all bytes from `size` on.
  void cut(int64_t size);

 private:
  void give_up(const char* what, int error);

  const std::filesystem::path path_;
  const std::string owner_;
  int fd_ = -1;
};

} // namespace tessera::train
