#include "launch/console.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tessera::launch {
namespace {

constexpr size_t kCongestedBytes = 1024 * 1024;
constexpr size_t kCompactBytes = 256 * 1024;

bool is_same_file(int a, int b) {
  struct stat stat_a;
  struct stat stat_b;
  return ::fstat(a, &stat_a) == 0 && ::fstat(b, &stat_b) == 0 &&
      stat_a.st_dev == stat_b.st_dev && stat_a.st_ino == stat_b.st_ino;
}

} // namespace

ConsoleSink::ConsoleSink(int fd, std::string name)
    : name_(std::move(name)), fd_(fd) {
  struct stat status;
  if (::fstat(fd, &status) != 0 ||
      !(S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode) ||
        S_ISSOCK(status.st_mode))) {
    return;
  }
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  own_fd_ = UniqueFd(
      ::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  may_block_ = !own_fd_;
}

void ConsoleSink::append(std::string_view text) {
  if (error_.empty()) {
    buffer_.append(text);
  }
}

void ConsoleSink::write_some() {
  while (pending() && error_.empty()) {
    size_t size = buffer_.size() - written_;
    if (may_block_) {
      // A pipe that is ready takes this much without blocking.
      pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
      if (::poll(&ready, 1, 0) <= 0) {
        return;
      }
      size = std::min(size, static_cast<size_t>(PIPE_BUF));
    }
    const ssize_t num_bytes = ::write(fd(), buffer_.data() + written_, size);
    if (num_bytes < 0) {
      if (errno == EAGAIN) {
        break;
      }
      if (errno != EINTR) {
        fail(errno);
      }
      continue;
    }
    written_ += static_cast<size_t>(num_bytes);
  }
  if (!pending() || written_ > kCompactBytes) {
    buffer_.erase(0, written_);
    written_ = 0;
  }
}

void ConsoleSink::fail(int error) {
  error_ = "cannot write to " + name_ + ": " + std::strerror(error) + ".";
  if (error == EPIPE) {
    error_ += " Its reader went away; keep it open, or write to a log folder.";
  }
  buffer_.clear();
  written_ = 0;
}

Console::Console(int out_fd, int err_fd) {
  sinks_.push_back(std::make_unique<ConsoleSink>(out_fd, "standard output"));
  if (!is_same_file(out_fd, err_fd)) {
    sinks_.push_back(std::make_unique<ConsoleSink>(err_fd, "standard error"));
  }
  out_ = sinks_.front().get();
  err_ = sinks_.back().get();
}

void Console::write(Stream stream, std::string_view lines) {
  switch (stream) {
    case Stream::kStdout:
      out_->append(lines);
      return;
    case Stream::kStderr:
      err_->append(lines);
      return;
  }
}

bool Console::congested() const {
  return std::any_of(sinks_.begin(), sinks_.end(), [](const auto& sink) {
    return sink->pending_bytes() > kCongestedBytes;
  });
}

bool Console::pending() const {
  return std::any_of(sinks_.begin(), sinks_.end(), [](const auto& sink) {
    return sink->pending();
  });
}

void Console::add_to_poll(std::vector<pollfd>* fds) const {
  for (const auto& sink : sinks_) {
    if (sink->pending()) {
      fds->push_back({.fd = sink->fd(), .events = POLLOUT, .revents = 0});
    }
  }
}

void Console::write_some() {
  for (const auto& sink : sinks_) {
    sink->write_some();
  }
}

std::string Console::error() const {
  for (const auto& sink : sinks_) {
    if (!sink->error().empty()) {
      return sink->error();
    }
  }
  return "";
}

} // namespace tessera::launch
