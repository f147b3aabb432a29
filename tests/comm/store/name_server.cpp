#include "comm/store/name_server.h"

#include <dlfcn.h>
#include <netdb.h>
#include <sys/socket.h>

#include <string_view>

namespace tessera::testing {

std::atomic<int> names_asked_for{0};
std::atomic<int> failures_left{0};

} // namespace tessera::testing

/// Replaces the C library's function: a name server with two names, of which
/// "six.test" has only an IPv6 address.
extern "C" __attribute__((visibility("default"))) int getaddrinfo(
    const char* name,
    const char* service,
    const addrinfo* hints,
    addrinfo** result) {
  static const auto real =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  const std::string_view asked = name == nullptr ? "" : name;
  if (asked == "later.test") {
    if (tessera::testing::failures_left.fetch_sub(1) > 0) {
      return EAI_NONAME;
    }
    return real("127.0.0.1", service, hints, result);
  }
  return real(asked == "six.test" ? "::1" : name, service, hints, result);
}

/// Replaces the C library's function, to see who asks name servers.
extern "C" __attribute__((visibility("default"))) int getnameinfo(
    const sockaddr* address,
    socklen_t length,
    char* host,
    socklen_t host_size,
    char* service,
    socklen_t service_size,
    int flags) {
  static const auto real =
      reinterpret_cast<decltype(&getnameinfo)>(dlsym(RTLD_NEXT, "getnameinfo"));
  tessera::testing::names_asked_for += (flags & NI_NUMERICHOST) == 0 ? 1 : 0;
  return real(
      address,
      length,
      host,
      host_size,
      service,
      service_size,
      flags | NI_NUMERICHOST);
}
