#include "comm/host.h"

#include <tessera/error.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>
#include <vector>

namespace tessera::comm {
namespace {

/// How often to ask name servers again.
constexpr std::chrono::milliseconds kAskAgain{500};

std::string link_target(const char* path) {
  char target[128];
  const ssize_t length = readlink(path, target, sizeof target);
  return length < 0 ? "?" : std::string(target, static_cast<size_t>(length));
}

/// The five parts of a host_identity().
std::vector<std::string> split(const std::string& identity) {
  std::vector<std::string> parts;
  std::istringstream in(identity);
  for (std::string part; std::getline(in, part, '/');) {
    parts.push_back(part);
  }
  parts.resize(5);
  return parts;
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  const int error = getnameinfo(
      address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text : "";
}

} // namespace

AddressList resolve(
    const std::string& host,
    int port,
    int socket_type,
    std::chrono::steady_clock::time_point deadline) {
  addrinfo hints{};
  hints.ai_socktype = socket_type;
  const std::string name = without_brackets(host);
  for (;;) {
    addrinfo* found = nullptr;
    const int error =
        getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (error == 0) {
      return {found, &freeaddrinfo};
    }
    if (std::chrono::steady_clock::now() + kAskAgain > deadline) {
      raise<c10::DistNetworkError>(
          {.call = "init"},
          fmt::format(
              "cannot resolve the host \"{}\": {}. Check MASTER_ADDR, and whether the name servers of this host know it.",
              host,
              gai_strerror(error)));
    }
    std::this_thread::sleep_for(kAskAgain);
  }
}

std::string without_brackets(const std::string& host) {
  return host.size() > 2 && host.starts_with('[') && host.ends_with(']')
      ? host.substr(1, host.size() - 2)
      : host;
}

std::string host_identity() {
  std::string boot;
  if (!(std::ifstream("/proc/sys/kernel/random/boot_id") >> boot)) {
    utsname names{}; // without /proc only the name tells hosts apart
    uname(&names);
    boot = std::string("?") + names.nodename;
  }
  return fmt::format(
      "{}/{}/{}/{}/{}",
      boot,
      link_target("/proc/self/ns/net"),
      link_target("/proc/self/ns/pid"),
      link_target("/proc/self/ns/user"),
      geteuid());
}

std::string what_separates(const std::string& one, const std::string& other) {
  constexpr std::array kParts{
      "", "", "process namespaces", "user namespaces", "users"};
  const auto ones = split(one);
  const auto others = split(other);
  std::string result;
  for (size_t i = 0; i < kParts.size(); ++i) {
    if (ones.at(i) == others.at(i)) {
      continue;
    }
    if (*kParts[i] == '\0') {
      return ""; // another boot or network: another host
    }
    result += (result.empty() ? "" : " and ") + std::string(kParts[i]);
  }
  return result;
}

bool is_loopback(const std::string& host) {
  const std::string name = without_brackets(host);
  in_addr ipv4{};
  in6_addr ipv6{};
  return name == "localhost" ||
      (inet_pton(AF_INET, name.c_str(), &ipv4) == 1 &&
       ntohl(ipv4.s_addr) >> 24 == 127) ||
      (inet_pton(AF_INET6, name.c_str(), &ipv6) == 1 &&
       IN6_IS_ADDR_LOOPBACK(&ipv6));
}

std::string address_towards(
    const std::string& host,
    int port,
    std::chrono::steady_clock::time_point deadline) {
  if (const char* chosen = std::getenv("TESSERA_SOCKET_ADDR");
      chosen != nullptr && *chosen != '\0') {
    in6_addr parsed{};
    if (inet_pton(AF_INET, chosen, &parsed) != 1 &&
        inet_pton(AF_INET6, chosen, &parsed) != 1) {
      raise<c10::ValueError>(
          {.call = "init"},
          fmt::format(
              "TESSERA_SOCKET_ADDR=\"{}\" is not a numeric address. Give an address of this host, as `ip addr` shows them.",
              chosen));
    }
    return chosen;
  }
  const AddressList addresses = resolve(host, port, SOCK_DGRAM, deadline);
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    // Connecting a datagram socket sends nothing; it only picks the route.
    const int fd = socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      continue;
    }
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    auto* local_address = reinterpret_cast<sockaddr*>(&local);
    const bool routed = connect(fd, at->ai_addr, at->ai_addrlen) == 0 &&
        getsockname(fd, local_address, &length) == 0;
    close(fd);
    if (routed) {
      return numeric(local_address, length);
    }
  }
  raise<c10::DistNetworkError>(
      {.call = "init"},
      fmt::format(
          "no route from this host to \"{}\". Check MASTER_ADDR, or set TESSERA_SOCKET_ADDR to this host's own address.",
          host));
}

} // namespace tessera::comm
