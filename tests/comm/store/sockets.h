// Plain sockets, for tests that speak to a store without its client.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "base/unique_fd.h"
#include "comm/host.h"
#include "comm/store/wire.h"

namespace tessera::comm {

/// How a refusal looks on a machine that is too busy to report it in time.
inline constexpr const char* kSlowRefusal = "it does not answer as a store";

inline UniqueFd listen_everywhere() {
  UniqueFd fd(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int off = 0;
  setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  EXPECT_EQ(
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any), 0);
  EXPECT_EQ(listen(fd.get(), 1024), 0);
  return fd;
}

inline int port_of(const UniqueFd& listener) {
  sockaddr_in6 bound{};
  socklen_t length = sizeof bound;
  EXPECT_EQ(
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &length),
      0);
  return ntohs(bound.sin6_port);
}

inline UniqueFd connect_over_ipv4(const char* address, int port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, address, &to.sin_addr);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
    fd.reset();
  }
  return fd;
}

inline UniqueFd connect_over_ipv6(const char* address, int port) {
  UniqueFd fd(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 to{};
  to.sin6_family = AF_INET6;
  to.sin6_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET6, address, &to.sin6_addr);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
    fd.reset();
  }
  return fd;
}

inline UniqueFd accept_from(const UniqueFd& listener) {
  return UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
}

/// An address of this host that is not loopback; empty if there is none.
inline std::string address_of_an_interface() {
  ifaddrs* all = nullptr;
  getifaddrs(&all);
  std::string result;
  for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr != nullptr && at->ifa_addr->sa_family == AF_INET) {
      char text[INET_ADDRSTRLEN];
      inet_ntop(
          AF_INET,
          &reinterpret_cast<sockaddr_in*>(at->ifa_addr)->sin_addr,
          text,
          sizeof text);
      result = is_loopback(text) ? result : text;
    }
  }
  freeifaddrs(all);
  return result;
}

/// A request with the greeting that comes before it.
inline std::string request(const wire::Message& message) {
  return wire::Message(wire::Query::kValidate).number(wire::kMagic).bytes() +
      message.bytes();
}

} // namespace tessera::comm
