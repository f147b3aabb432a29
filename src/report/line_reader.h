// Reads the lines of an untrusted file one at a time, in bounded memory however
// long the file and its lines are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::report {

class LineReader {
 public:
  struct Line {
    std::string_view text; // without its end; valid until the next call
    int64_t number = 0; // from 1
    bool is_too_long = false; // then `text` is empty
    bool has_end = false; // false only for a last line without '\n'
  };

  /// Throws ReportError if the file cannot be opened.
  LineReader(const std::filesystem::path& path, size_t max_bytes);

  /// False at the end of the file. Throws ReportError if reading fails.
  bool next(Line* line);

 private:
  struct Close {
    void operator()(std::FILE* file) const {
      std::fclose(file);
    }
  };

  bool fill();
  bool skip_rest_of_line();

  std::filesystem::path path_;
  size_t max_bytes_;
  std::unique_ptr<std::FILE, Close> file_;
  std::string buffer_;
  size_t begin_ = 0; // of the bytes that were read but not returned yet
  int64_t number_ = 0;
};

} // namespace tessera::report
