#include "file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace gpt {
namespace {

int open_lock(const std::filesystem::path& path) {
  std::filesystem::create_directories(path.parent_path());
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) {
    throw std::runtime_error(
        "cannot write to \"" + path.parent_path().string() +
        "\": " + std::strerror(errno) + ".");
  }
  return fd;
}

/// False if `how` does not wait and another process has the lock.
bool lock(int fd, int how, const std::filesystem::path& path) {
  int result = 0;
  do {
    result = ::flock(fd, how);
  } while (result != 0 && errno == EINTR);
  if (result == 0 || errno == EWOULDBLOCK) {
    return result == 0;
  }
  throw std::runtime_error(
      "cannot lock \"" + path.string() + "\": " + std::strerror(errno) +
      ". Choose a folder on a file system with locks.");
}

} // namespace

FileLock::FileLock(const std::filesystem::path& path)
    : FileLock(open_lock(path)) {
  lock(fd_, LOCK_EX, path);
}

std::optional<FileLock> FileLock::if_free(const std::filesystem::path& path) {
  FileLock held(open_lock(path));
  if (!lock(held.fd_, LOCK_EX | LOCK_NB, path)) {
    return std::nullopt;
  }
  return held;
}

FileLock::FileLock(FileLock&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

FileLock& FileLock::operator=(FileLock&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

FileLock::~FileLock() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

} // namespace gpt
