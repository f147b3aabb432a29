#include "report/line_reader.h"

#include <cerrno>
#include <cstring>

#include "report/report_error.h"

namespace tessera::report {
namespace {

constexpr size_t kChunkBytes = 1 << 20;

[[noreturn]] void fail_to_read(
    const std::filesystem::path& path,
    const char* what) {
  throw ReportError(
      "\"" + path.string() + "\" " + what + ": " + std::strerror(errno) + ".");
}

} // namespace

LineReader::LineReader(const std::filesystem::path& path, size_t max_bytes)
    : path_(path),
      max_bytes_(max_bytes),
      file_(std::fopen(path.c_str(), "rbe")) {
  if (!file_) {
    fail_to_read(path_, "cannot be opened");
  }
}

bool LineReader::fill() {
  buffer_.erase(0, begin_);
  begin_ = 0;
  const size_t had = buffer_.size();
  buffer_.resize(had + kChunkBytes);
  const size_t got =
      std::fread(buffer_.data() + had, 1, kChunkBytes, file_.get());
  buffer_.resize(had + got);
  if (got == 0 && std::ferror(file_.get()) != 0) {
    fail_to_read(path_, "cannot be read");
  }
  return got > 0;
}

bool LineReader::skip_rest_of_line() {
  do {
    const size_t end = buffer_.find('\n', begin_);
    if (end != std::string::npos) {
      begin_ = end + 1;
      return true;
    }
    begin_ = buffer_.size();
  } while (fill());
  return false;
}

bool LineReader::next(Line* line) {
  size_t searched = 0; // bytes of this line that have no '\n'
  while (true) {
    const size_t end = buffer_.find('\n', begin_ + searched);
    const size_t size =
        (end == std::string::npos ? buffer_.size() : end) - begin_;
    if (size > max_bytes_) {
      *line = {
          .number = ++number_,
          .is_too_long = true,
          .has_end = skip_rest_of_line()};
      return true;
    }
    if (end != std::string::npos) {
      *line = {
          .text = std::string_view(buffer_).substr(begin_, size),
          .number = ++number_,
          .has_end = true};
      begin_ = end + 1;
      return true;
    }
    searched = size;
    if (fill()) {
      continue;
    }
    *line = {
        .text = std::string_view(buffer_).substr(begin_),
        .number = number_ + 1,
        .has_end = false};
    begin_ = buffer_.size();
    number_ += line->text.empty() ? 0 : 1;
    return !line->text.empty();
  }
}

} // namespace tessera::report
