// A file of lines that is only ever appended to.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "train/append_file.h"

namespace tessera::train {

/// Each line is one write at the end of the file. The first error causes a
/// warning and closes the file: training must not fail because of its log.
class LogFile {
 public:
  /// Creates the file and its folders if they do not exist.
  explicit LogFile(const std::filesystem::path& path);

  bool is_open() const {
    return file_.is_open();
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
  bool is_torn_; // the last line has no end
  AppendFile file_;
};

} // namespace tessera::train
