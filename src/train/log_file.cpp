#include "train/log_file.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
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

LogFile::LogFile(const std::filesystem::path& path) : path_(path) {
  std::error_code error;
  if (path.has_parent_path()) {
    std::filesystem::create_directories(path.parent_path(), error);
  }
  if (error) {
    give_up("its folder cannot be created", error.value());
    return;
  }
  is_torn_ = ends_torn(path);
  constexpr mode_t kMode = 0666;
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, kMode);
  if (fd_ < 0) {
    give_up("it cannot be opened", errno);
  }
}

LogFile::~LogFile() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

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
  if (fd_ < 0) {
    return;
  }
  std::string text(std::exchange(is_torn_, false) ? "\n" : "");
  text += line;
  text += '\n';
  ssize_t written = 0;
  do {
    written = ::write(fd_, text.data(), text.size());
  } while (written < 0 && errno == EINTR);
  if (written < 0) {
    give_up("it cannot be written", errno);
  } else if (static_cast<size_t>(written) < text.size()) {
    give_up("a line did not fit", ENOSPC);
  }
}

void LogFile::give_up(const char* what, int error) {
  TORCH_WARN(
      "RunLog: ",
      path_.string(),
      ": ",
      what,
      " (",
      std::generic_category().message(error),
      "). Training continues; nothing more is logged.");
  if (fd_ >= 0) {
    ::close(std::exchange(fd_, -1));
  }
}

} // namespace tessera::train
