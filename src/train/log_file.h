// A file of lines that is only ever appended to.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace tessera::train {

/// Each line is one write at the end of the file. The first error causes a
/// warning and closes the file: training must not fail because of its log.
class LogFile {
 public:
  /// Creates the file and its folders if they do not exist.
  explicit LogFile(const std::filesystem::path& path);
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  bool is_open() const {
    return fd_ >= 0;
  }
  /// How many lines of a file begin with `prefix`; 0 if the file does not
  /// exist.
  static int64_t count_lines(
      const std::filesystem::path& path,
      std::string_view prefix);
  /// Takes a line without its end. If the last line of the file is torn, begins
  /// a new line first.
  void append(std::string_view line);

 private:
  void give_up(const char* what, int error);

  std::filesystem::path path_;
  int fd_ = -1;
  bool is_torn_ = false; // the last line has no end
};

} // namespace tessera::train
