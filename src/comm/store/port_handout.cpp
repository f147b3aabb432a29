#include "comm/store/port_handout.h"

#include <tessera/error.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "base/unique_fd.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Milliseconds kAskAgain{20};

struct UnixAddress {
  sockaddr_un address{};
  socklen_t length = 0;
};

UnixAddress abstract_address(const std::string& job_id) {
  const std::string name = fmt::format("tessera/{}/{}", geteuid(), job_id);
  UnixAddress result;
  result.address.sun_family = AF_UNIX;
  // A leading zero byte makes the name abstract.
  const size_t count =
      std::min(name.size(), sizeof result.address.sun_path - 1);
  std::memcpy(result.address.sun_path + 1, name.data(), count);
  result.length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + count);
  return result;
}

bool is_same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
      peer.uid == geteuid();
}

/// Makes connect() and recv() on a socket end by `deadline`: connect() waits
/// too, if the listener accepts nobody.
void limit_waits(int fd, Clock::time_point deadline) {
  const auto left = std::max(
      std::chrono::duration_cast<std::chrono::microseconds>(
          deadline - Clock::now()),
      std::chrono::microseconds(1)); // zero would mean without a limit
  const timeval limit{
      .tv_sec = left.count() / 1'000'000, .tv_usec = left.count() % 1'000'000};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

} // namespace

PortHandout::PortHandout(const std::string& job_id, int port) {
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  wake_ = eventfd(0, EFD_CLOEXEC);
  const UnixAddress name = abstract_address(job_id);
  const auto* address = reinterpret_cast<const sockaddr*>(&name.address);
  if (listener_ < 0 || wake_ < 0 ||
      bind(listener_, address, name.length) != 0 ||
      listen(listener_, SOMAXCONN) != 0) {
    const int error = errno;
    close(listener_);
    close(wake_);
    raise<c10::DistNetworkError>(
        {.call = "init"},
        fmt::format(
            "cannot offer the port of rank 0 to job \"{}\" ({}). Two processes with rank 0 in one job? Otherwise set MASTER_ADDR and MASTER_PORT.",
            job_id,
            std::strerror(error)));
  }
  thread_ = std::thread([listener = listener_, wake = wake_, port] {
    const auto answer = static_cast<uint32_t>(port);
    while (true) {
      pollfd waits[] = {{listener, POLLIN, 0}, {wake, POLLIN, 0}};
      if (poll(waits, 2, -1) < 0 && errno != EINTR) {
        return;
      }
      if (waits[1].revents != 0) {
        return;
      }
      if (waits[0].revents == 0) {
        continue;
      }
      const int client = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (client >= 0) {
        if (is_same_user(client)) {
          send(client, &answer, sizeof answer, MSG_NOSIGNAL);
        }
        close(client);
      }
    }
  });
}

PortHandout::~PortHandout() {
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof one) == sizeof one) {
    thread_.join();
  } else {
    thread_.detach();
  }
  close(listener_);
  close(wake_);
}

int PortHandout::ask(const std::string& job_id, Milliseconds timeout) {
  const UnixAddress name = abstract_address(job_id);
  const auto* address = reinterpret_cast<const sockaddr*>(&name.address);
  const auto deadline = Clock::now() + timeout;
  bool is_silent = false;
  while (Clock::now() < deadline) {
    const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    limit_waits(fd.get(), deadline);
    uint32_t port = 0;
    const bool connected = fd && connect(fd.get(), address, name.length) == 0;
    if (connected && is_same_user(fd.get()) &&
        recv(fd.get(), &port, sizeof port, MSG_WAITALL) == sizeof port) {
      return static_cast<int>(port);
    }
    is_silent =
        connected || errno == EAGAIN; // rank 0 listens, and does not answer
    std::this_thread::sleep_for(kAskAgain);
  }
  raise<c10::DistNetworkError>(
      {.call = "init"},
      fmt::format(
          "rank 0 of job \"{}\" did not offer its port within {:.1f} s. {} If the job spans several hosts, set MASTER_ADDR and MASTER_PORT.",
          job_id,
          std::chrono::duration<double>(timeout).count(),
          is_silent ? "It is there and does not answer: is it suspended?"
                    : "Did it start?"));
}

} // namespace tessera::comm
