#include "comm/store.h"

#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>

#include "comm/call.h"
#include "comm/host.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Milliseconds kRetry{20};
/// The least that a store gets to answer once it was reached.
constexpr Milliseconds kGreeting{500};

double seconds(Milliseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

[[noreturn]] void throw_network(const std::string& what) {
  raise<c10::DistNetworkError>({.call = "init"}, what);
}

/// A listening socket. Bound by us, not by c10d, which listens on every
/// interface even where only this host should reach the store.
int listen_on(StoreEndpoint& endpoint) {
  const bool loopback = is_loopback(endpoint.address);
  const bool ipv6 = endpoint.address.find(':') != std::string::npos;
  const int fd =
      socket(ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    throw_network(fmt::format("socket: {}", std::strerror(errno)));
  }
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage storage{};
  socklen_t length = 0;
  if (ipv6) {
    auto& address = reinterpret_cast<sockaddr_in6&>(storage);
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<uint16_t>(endpoint.port));
    address.sin6_addr = loopback ? in6addr_loopback : in6addr_any;
    length = sizeof address;
  } else {
    auto& address = reinterpret_cast<sockaddr_in&>(storage);
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(endpoint.port));
    address.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
    length = sizeof address;
  }
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (bind(fd, address, length) != 0 || listen(fd, SOMAXCONN) != 0) {
    const int error = errno;
    close(fd);
    throw_network(fmt::format(
        "cannot listen on {} ({}). Another program, or an earlier run that is still there, may hold the port: choose another MASTER_PORT, or use `tessera run`, which takes a free one.",
        endpoint.to_string(),
        std::strerror(error)));
  }
  if (getsockname(fd, address, &length) == 0) {
    endpoint.port = ntohs(
        ipv6 ? reinterpret_cast<sockaddr_in6&>(storage).sin6_port
             : reinterpret_cast<sockaddr_in&>(storage).sin_port);
  }
  return fd;
}

/// 0 if somebody listens there, else the errno of the attempt.
int try_to_reach(const StoreEndpoint& endpoint) {
  constexpr int kPatienceMs = 1000;
  const AddressList addresses =
      resolve(endpoint.address, endpoint.port, SOCK_STREAM);
  int error = ECONNREFUSED;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    const int fd =
        socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
      error = errno;
      continue;
    }
    error = connect(fd, at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd connected{fd, POLLOUT, 0};
      socklen_t length = sizeof error;
      if (poll(&connected, 1, kPatienceMs) <= 0) {
        error = ETIMEDOUT;
      } else {
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
    close(fd);
    if (error == 0) {
      return 0;
    }
  }
  return error;
}

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

} // namespace

StorePtr host_store(StoreEndpoint& endpoint, Milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.masterListenFd = listen_on(endpoint);
  options.port = static_cast<uint16_t>(endpoint.port);
  try {
    return c10::make_intrusive<c10d::TCPStore>(endpoint.address, options);
  } catch (const std::exception& error) {
    throw_network(fmt::format(
        "the store on {} could not be started: {}",
        endpoint.to_string(),
        error.what()));
  }
}

StorePtr connect_store(
    const StoreEndpoint& endpoint,
    Milliseconds timeout,
    std::string_view advice) {
  const auto give_up = [&](std::string_view reason) {
    throw_network(fmt::format(
        "no store answered on {} within {:.1f} s. {} ({})",
        endpoint.to_string(),
        seconds(timeout),
        advice,
        reason.substr(0, reason.find('\n'))));
  };
  // c10d would retry too, but warns with a stack trace at each attempt.
  const auto deadline = Clock::now() + timeout;
  while (const int error = try_to_reach(endpoint)) {
    if (Clock::now() + kRetry > deadline) {
      give_up(std::strerror(error));
    }
    std::this_thread::sleep_for(kRetry);
  }
  // c10d's greeting has no time limit: a program that listens there but is no
  // store would hold us for ever. So it runs on a thread that, then, stays
  // behind.
  auto attempt = std::make_shared<std::promise<StorePtr>>();
  auto connected = attempt->get_future();
  std::thread([attempt, endpoint, timeout] {
    try {
      c10d::TCPStoreOptions options;
      options.isServer = false;
      options.waitWorkers = false;
      options.timeout = timeout;
      options.port = static_cast<uint16_t>(endpoint.port);
      attempt->set_value(
          c10::make_intrusive<c10d::TCPStore>(endpoint.address, options));
    } catch (...) {
      attempt->set_exception(std::current_exception());
    }
  }).detach();
  if (connected.wait_until(std::max(deadline, Clock::now() + kGreeting)) !=
      std::future_status::ready) {
    give_up("something listens there, but it does not answer as a store");
  }
  try {
    return connected.get();
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  }
}

std::vector<std::string> exchange(
    c10d::Store& store,
    const std::string& key,
    int rank,
    const std::vector<int>& names,
    const std::string& value,
    Milliseconds timeout,
    const std::string& call) {
  std::vector<std::string> keys;
  for (size_t peer = 0; peer < names.size(); ++peer) {
    keys.push_back(key + "/" + std::to_string(peer));
  }
  store.set(keys[static_cast<size_t>(rank)], value);
  try {
    store.wait(keys, timeout);
  } catch (const c10::DistError&) {
    std::vector<int> missing;
    for (size_t peer = 0; peer < names.size(); ++peer) {
      if (!store.check({keys[peer]})) {
        missing.push_back(names[peer]);
      }
    }
    if (missing.empty()) {
      missing.push_back(names.front());
    }
    raise<TimeoutError>(
        {.call = call, .rank = names[static_cast<size_t>(rank)]},
        fmt::format(
            "timed out after {:.1f} s while ranks set up what they share: {} did not come. Look at what stopped it, or raise the timeout.",
            seconds(timeout),
            rank_list(missing)));
  }
  std::vector<std::string> values;
  for (const auto& bytes : store.multiGet(keys)) {
    values.emplace_back(bytes.begin(), bytes.end());
  }
  return values;
}

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
    throw_network(fmt::format(
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
  while (Clock::now() < deadline) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    uint32_t port = 0;
    const bool answered = fd >= 0 && connect(fd, address, name.length) == 0 &&
        is_same_user(fd) &&
        recv(fd, &port, sizeof port, MSG_WAITALL) == sizeof port;
    close(fd);
    if (answered) {
      return static_cast<int>(port);
    }
    std::this_thread::sleep_for(kRetry);
  }
  throw_network(fmt::format(
      "rank 0 of job \"{}\" did not offer its port within {:.1f} s. Did it start? If the job spans several hosts, set MASTER_ADDR and MASTER_PORT.",
      job_id,
      seconds(timeout)));
}

} // namespace tessera::comm
