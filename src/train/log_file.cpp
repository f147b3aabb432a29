#include "train/log_file.h"

#include <fstream>
#include <system_error>
#include <utility>

namespace tessera::train {
namespace {

bool is_file(const std::filesystem::path& path) {
  std::error_code ignored; // opening the file will report it
  return std::filesystem::is_regular_file(path, ignored);
}

/// Whether the last byte of a file is not the end of a line.
bool ends_torn(const std::filesystem::path& path) {
  if (!is_file(path)) {
    return false;
  }
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in || in.tellg() <= 0) {
    return false;
  }
  in.seekg(-1, std::ios::end);
  return in.get() != '\n';
}

} // namespace

LogFile::LogFile(const std::filesystem::path& path)
    : is_torn_(ends_torn(path)), file_(path, "RunLog") {}

int64_t LogFile::count_lines(
    const std::filesystem::path& path,
    std::string_view prefix) {
  if (!is_file(path)) {
    return 0; // a device may have no end
  }
  std::ifstream in(path, std::ios::binary);
  int64_t count = 0;
  for (std::string line; std::getline(in, line);) {
    const bool is_whole = !in.eof(); // a torn line does not count
    count += is_whole && line.starts_with(prefix) ? 1 : 0;
  }
  return count;
}

void LogFile::append(std::string_view line) {
  if (!file_.is_open()) {
    return;
  }
  std::string text(std::exchange(is_torn_, false) ? "\n" : "");
  text += line;
  text += '\n';
  file_.append(text);
}

} // namespace tessera::train
