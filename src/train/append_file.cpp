#include "train/append_file.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace tessera::train {

AppendFile::AppendFile(const std::filesystem::path& path, std::string owner)
    : path_(path), owner_(std::move(owner)) {
  std::error_code error;
  if (path.has_parent_path()) {
    std::filesystem::create_directories(path.parent_path(), error);
  }
  if (error) {
    give_up("its folder cannot be created", error.value());
    return;
  }
  constexpr mode_t kMode = 0666;
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, kMode);
  if (fd_ < 0) {
    give_up("it cannot be opened", errno);
  }
}

AppendFile::~AppendFile() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void AppendFile::append(std::string_view bytes) {
  if (fd_ < 0) {
    return;
  }
  ssize_t written = 0;
  do {
    written = ::write(fd_, bytes.data(), bytes.size());
  } while (written < 0 && errno == EINTR);
  if (written < 0) {
    give_up("it cannot be written", errno);
  } else if (static_cast<size_t>(written) < bytes.size()) {
    struct stat now {};
    const bool is_cut =
        ::fstat(fd_, &now) == 0 && ::ftruncate(fd_, now.st_size - written) == 0;
    give_up(
        is_cut ? "a line did not fit"
               : "a line did not fit, and its beginning stays",
        ENOSPC);
  }
}

void AppendFile::cut(int64_t size) {
  if (fd_ >= 0 && ::ftruncate(fd_, size) != 0) {
    give_up("its end cannot be removed", errno);
  }
}

void AppendFile::give_up(const char* what, int error) {
  TORCH_WARN(
      owner_,
      ": ",
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
