#include "comm/store/store.h"

#include <tessera/error.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>
#include <utility>

#include "comm/diagnostics/call.h"
#include "comm/host.h"
#include "comm/store/client.h"
#include "comm/store/connect.h"
#include "comm/store/secret.h"
#include "comm/store/server.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Milliseconds kRetry{20};

double seconds(Milliseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

[[noreturn]] void throw_network(const std::string& what) {
  raise<c10::DistNetworkError>({.call = "init"}, what);
}

sockaddr_storage ipv4_address(in_addr_t address, int port) {
  sockaddr_storage storage{};
  auto& ipv4 = reinterpret_cast<sockaddr_in&>(storage);
  ipv4.sin_family = AF_INET;
  ipv4.sin_port = htons(static_cast<uint16_t>(port));
  ipv4.sin_addr.s_addr = address;
  return storage;
}

sockaddr_storage ipv6_address(const in6_addr& address, int port) {
  sockaddr_storage storage{};
  auto& ipv6 = reinterpret_cast<sockaddr_in6&>(storage);
  ipv6.sin6_family = AF_INET6;
  ipv6.sin6_port = htons(static_cast<uint16_t>(port));
  ipv6.sin6_addr = address;
  return storage;
}

/// The addresses to listen on, of which the first that works is taken: a
/// loopback address alone, or all addresses of this host.
std::vector<sockaddr_storage> addresses_to_bind(const StoreEndpoint& endpoint) {
  const int port = endpoint.port;
  in_addr ipv4{};
  if (!is_loopback(endpoint.address)) {
    return {ipv6_address(in6addr_any, port), ipv4_address(INADDR_ANY, port)};
  }
  if (inet_pton(AF_INET, endpoint.address.c_str(), &ipv4) == 1) {
    return {ipv4_address(ipv4.s_addr, port)};
  }
  if (endpoint.address.find(':') != std::string::npos) {
    return {ipv6_address(in6addr_loopback, port)};
  }
  return {
      ipv4_address(htonl(INADDR_LOOPBACK), port),
      ipv6_address(in6addr_loopback, port)};
}

socklen_t length_of(const sockaddr_storage& storage) {
  return storage.ss_family == AF_INET6 ? sizeof(sockaddr_in6)
                                       : sizeof(sockaddr_in);
}

/// A listening socket, or none with the reason in errno.
UniqueFd listen_on(const sockaddr_storage& address) {
  UniqueFd fd(socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) {
    return fd;
  }
  const int on = 1;
  const int off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.ss_family == AF_INET6) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  }
  if (bind(
          fd.get(),
          reinterpret_cast<const sockaddr*>(&address),
          length_of(address)) != 0 ||
      listen(fd.get(), SOMAXCONN) != 0) {
    const int error = errno;
    fd.reset();
    errno = error;
  }
  return fd;
}

/// A listening socket; `endpoint.port` is its port afterwards.
UniqueFd listen_on(StoreEndpoint& endpoint) {
  UniqueFd fd;
  for (const sockaddr_storage& address : addresses_to_bind(endpoint)) {
    fd = listen_on(address);
    // A host without IPv6, or without this address.
    if (fd || (errno != EAFNOSUPPORT && errno != EADDRNOTAVAIL)) {
      break;
    }
  }
  if (!fd) {
    throw_network(fmt::format(
        "cannot listen on {} ({}). Another program, or an earlier run that is still there, may hold the port: choose another MASTER_PORT, or use `tessera run`, which takes a free one.",
        endpoint.to_string(),
        std::strerror(errno)));
  }
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) ==
      0) {
    endpoint.port = ntohs(
        bound.ss_family == AF_INET6
            ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
            : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  }
  return fd;
}

/// This process reaches its own store through loopback, however others reach
/// it: through the first of these addresses that works.
std::vector<StoreEndpoint> seen_from_here(const UniqueFd& listener, int port) {
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &length);
  if (bound.ss_family == AF_INET6) {
    const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(bound).sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&ipv6)
        ? std::vector<StoreEndpoint>{{"::1", port}}
        : std::vector<StoreEndpoint>{{"127.0.0.1", port}, {"::1", port}};
  }
  const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(bound).sin_addr;
  char text[INET_ADDRSTRLEN] = "127.0.0.1";
  if (ipv4.s_addr != htonl(INADDR_ANY)) {
    inet_ntop(AF_INET, &ipv4, text, sizeof text);
  }
  return {{text, port}};
}

} // namespace

std::string StoreEndpoint::to_string() const {
  return address.find(':') == std::string::npos
      ? fmt::format("{}:{}", address, port)
      : fmt::format("[{}]:{}", address, port);
}

std::optional<StoreEndpoint> StoreEndpoint::parse(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) {
    return std::nullopt;
  }
  StoreEndpoint endpoint;
  const std::string_view number = text.substr(colon + 1);
  const char* end = number.data() + number.size();
  const auto [stop, error] = std::from_chars(number.data(), end, endpoint.port);
  std::string_view host = text.substr(0, colon);
  const bool is_in_brackets = host.starts_with('[') && host.ends_with(']');
  if (is_in_brackets) {
    host = host.substr(1, host.size() - 2);
  }
  // Without brackets the end of an IPv6 address cannot be told.
  const bool is_clear = is_in_brackets || host.find(':') == host.npos;
  if (error != std::errc() || stop != end || endpoint.port < 1 ||
      endpoint.port > 65535 || host.empty() || !is_clear) {
    return std::nullopt;
  }
  endpoint.address = host;
  return endpoint;
}

StorePtr host_store(StoreEndpoint& endpoint, Milliseconds timeout) {
  endpoint.address = without_brackets(endpoint.address);
  const std::string secret = secret_from_environment();
  UniqueFd listener = listen_on(endpoint);
  const auto nearby_endpoints = seen_from_here(listener, endpoint.port);
  std::shared_ptr<StoreServer> server;
  std::string problem;
  try {
    server = std::make_shared<StoreServer>(std::move(listener), secret);
    for (const StoreEndpoint& nearby : nearby_endpoints) {
      const AddressList addresses =
          resolve(nearby.address, nearby.port, SOCK_STREAM);
      if (UniqueFd socket = connect_to_store(
              addresses, secret, Clock::now() + timeout, problem)) {
        return c10::make_intrusive<StoreClient>(
            std::move(socket), nearby, timeout, std::move(server));
      }
    }
  } catch (const std::system_error& error) {
    problem = error.what();
  }
  throw_network(fmt::format(
      "the store on {} could not be started: {}. `tessera doctor` tells whether ranks can meet on this host.",
      endpoint.to_string(),
      problem));
}

StorePtr connect_store(
    const StoreEndpoint& endpoint,
    Milliseconds timeout,
    std::string_view advice) {
  const auto deadline = Clock::now() + timeout;
  const std::string secret = secret_from_environment();
  // Resolved once, so that name servers are not asked at each attempt.
  const AddressList addresses =
      resolve(endpoint.address, endpoint.port, SOCK_STREAM, deadline);
  for (;;) {
    std::string problem;
    if (UniqueFd socket =
            connect_to_store(addresses, secret, deadline, problem)) {
      return c10::make_intrusive<StoreClient>(
          std::move(socket), endpoint, timeout);
    }
    if (Clock::now() + kRetry > deadline) {
      throw_network(fmt::format(
          "no store answered on {} within {:.1f} s. {} ({})",
          endpoint.to_string(),
          seconds(timeout),
          advice,
          problem));
    }
    std::this_thread::sleep_for(kRetry);
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
  const ErrorSite site{.call = call, .rank = names[static_cast<size_t>(rank)]};
  std::vector<std::string> values;
  try {
    store.set(keys[static_cast<size_t>(rank)], value);
    store.wait(keys, timeout);
    for (const auto& bytes : store.multiGet(keys)) {
      values.emplace_back(bytes.begin(), bytes.end());
    }
  } catch (const c10::DistNetworkError& error) {
    raise<PeerLostError>(site, error.what());
  } catch (const c10::DistStoreError&) {
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
        site,
        fmt::format(
            "timed out after {:.1f} s while ranks set up what they share: {} did not come. Look at what stopped it, or raise the timeout.",
            seconds(timeout),
            rank_list(missing)));
  }
  return values;
}

} // namespace tessera::comm
