#include "comm/host.h"

#include <tessera/error.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>

namespace tessera::comm {
namespace {

std::string link_target(const char* path) {
  char target[128];
  const ssize_t length = readlink(path, target, sizeof target);
  return length < 0 ? "?" : std::string(target, static_cast<size_t>(length));
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  const int error = getnameinfo(
      address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text : "";
}

} // namespace

AddressList resolve(const std::string& host, int port, int socket_type) {
  addrinfo hints{};
  hints.ai_socktype = socket_type;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    raise<c10::DistNetworkError>(
        {.call = "init"},
        fmt::format(
            "cannot resolve the host \"{}\": {}. Check MASTER_ADDR.",
            host,
            gai_strerror(error)));
  }
  return {found, &freeaddrinfo};
}

std::string host_identity() {
  std::string boot = "?";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fmt::format(
      "{}/{}/{}/{}",
      boot,
      link_target("/proc/self/ns/net"),
      link_target("/proc/self/ns/pid"),
      geteuid());
}

int available_cores() {
  // glibc counts what sched_getaffinity allows, however many there are.
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
}

std::string address_towards(const std::string& host, int port) {
  if (const char* chosen = std::getenv("TESSERA_SOCKET_ADDR");
      chosen != nullptr && *chosen != '\0') {
    in6_addr parsed{};
    if (inet_pton(AF_INET, chosen, &parsed) != 1 &&
        inet_pton(AF_INET6, chosen, &parsed) != 1) {
      raise<c10::ValueError>(
          {.call = "init"},
          fmt::format(
              "TESSERA_SOCKET_ADDR=\"{}\" is no numeric address. Give one of this host's, as `ip addr` shows them.",
              chosen));
    }
    return chosen;
  }
  const AddressList addresses = resolve(host, port, SOCK_DGRAM);
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
