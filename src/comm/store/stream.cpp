#include "comm/store/stream.h"

#include <tessera/error.h>

#include <poll.h>
#include <sys/socket.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

void check(const wire::Message& message) {
  std::string_view bytes = message.bytes();
  size_t needed = 0;
  try {
    wire::take_request(bytes, needed);
  } catch (const wire::BadRequest& error) {
    raise<c10::DistStoreError>(
        {.call = "store"},
        fmt::format(
            "the store does not take this request of {} bytes: {}. A key has {} bytes at most, a value {}. The store is for meeting: send data with a collective.",
            bytes.size(),
            error.what(),
            wire::kMaxKeyBytes,
            wire::kMaxValueBytes));
  }
}

} // namespace

Deadline after(Milliseconds timeout) {
  return timeout == c10d::Store::kNoTimeout ? Deadline::max()
                                            : Clock::now() + timeout;
}

int wait_for(int fd, short events, Deadline deadline) {
  constexpr Milliseconds kLongest = std::chrono::hours(1);
  for (;;) {
    const auto left = deadline - Clock::now();
    const auto turn = std::clamp<Clock::duration>(left, {}, kLongest);
    pollfd waited{fd, events, 0};
    const int count = poll(
        &waited,
        1,
        static_cast<int>(std::chrono::ceil<Milliseconds>(turn).count()));
    if (count > 0) {
      return 0;
    }
    if (count < 0 && errno != EINTR) {
      return errno;
    }
    if (Clock::now() >= deadline) {
      return ETIMEDOUT;
    }
  }
}

void StoreStream::send(const wire::Message& message) {
  check(message);
  send_bytes(message.bytes());
}

void StoreStream::send_bytes(std::string_view rest) {
  while (!rest.empty()) {
    const ssize_t count = ::send(fd_, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      rest.remove_prefix(static_cast<size_t>(count));
    } else {
      wait_or_throw(POLLOUT);
    }
  }
}

std::vector<uint8_t> StoreStream::bytes() {
  const auto size = number<uint64_t>();
  if (size > wire::kMaxRequestBytes) {
    throw StreamClosed("it sent something that is not an answer");
  }
  std::vector<uint8_t> result(size);
  receive(result.data(), result.size());
  return result;
}

void StoreStream::receive(void* into, size_t size) {
  auto* at = static_cast<char*>(into);
  while (size > 0) {
    const ssize_t count = recv(fd_, at, size, 0);
    if (count > 0) {
      at += count;
      size -= static_cast<size_t>(count);
    } else if (count == 0) {
      throw StreamClosed("it closed the connection");
    } else {
      wait_or_throw(POLLIN);
    }
  }
}

void StoreStream::wait_or_throw(short events) {
  if (errno == EINTR) {
    return;
  }
  if (errno != EAGAIN && errno != EWOULDBLOCK) {
    throw StreamClosed(std::strerror(errno));
  }
  if (wait_for(fd_, events, deadline_) == ETIMEDOUT) {
    throw StreamSilent();
  }
}

} // namespace tessera::comm
