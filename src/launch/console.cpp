#include "launch/console.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
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

constexpr std::string_view kWipeLine = "\r\x1b[K";
constexpr int kUsualColumns = 80;

int terminal_columns(int fd) {
  const char* kind = std::getenv("TERM");
  if (::isatty(fd) != 1 || kind == nullptr ||
      std::string_view(kind) == "dumb") {
    return 0;
  }
  winsize size{};
  const bool is_known = ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return is_known ? size.ws_col : kUsualColumns;
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

Console::Console(int out_fd, int err_fd)
    : live_columns_(terminal_columns(out_fd)) {
  sinks_.push_back(std::make_unique<ConsoleSink>(out_fd, "standard output"));
  if (!is_same_file(out_fd, err_fd)) {
    sinks_.push_back(std::make_unique<ConsoleSink>(err_fd, "standard error"));
  }
  out_ = sinks_.front().get();
  err_ = sinks_.back().get();
}

void Console::write(Stream stream, std::string_view lines) {
  if (!live_.empty()) {
    out_->append(kWipeLine);
  }
  switch (stream) {
    case Stream::Stdout:
      out_->append(lines);
      break;
    case Stream::Stderr:
      err_->append(lines);
      break;
  }
  out_->append(live_);
}

void Console::set_live(std::string_view line) {
  if (live_columns_ == 0 || line == live_) {
    return;
  }
  // A line that fills the terminal would wrap, and only its end be wiped.
  live_ = line.substr(0, static_cast<size_t>(live_columns_ - 1));
  out_->append(kWipeLine);
  out_->append(live_);
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
