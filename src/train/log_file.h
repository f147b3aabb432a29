// A file of lines that is only ever appended to.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace tessera::train {

/// Each line is one write at the end of the file. The first error is warned of
/// and closes it: whoever writes a log has better things to do than to fail for
/// it.
class LogFile {
 public:
  /// Makes the file and its folders if they are not there.
  explicit LogFile(const std::filesystem::path& path);
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  bool is_open() const {
    return fd_ >= 0;
  }
  /// Lines of a file that begin with `prefix`; 0 if it is not there.
  static int64_t count_lines(
      const std::filesystem::path& path,
      std::string_view prefix);
  /// `line` without its end. If somebody's last line is torn, a new one is
  /// begun first.
  void append(std::string_view line);

 private:
  void give_up(const char* what, int error);

  std::filesystem::path path_;
  int fd_ = -1;
  bool is_torn_ = false; // the last line has no end
};

} // namespace tessera::train
