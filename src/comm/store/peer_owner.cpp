#include "comm/store/peer_owner.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>

#include "base/unique_fd.h"
#include "comm/store/socket_tables.h"

namespace tessera::comm {
namespace {

// ---- Addresses

bool is_loopback_end(const ConnectionEnd& end) {
  if (end.family == AF_INET) {
    return ntohl(end.address[0]) >> 24 == 127;
  }
  return std::memcmp(end.address.data(), &in6addr_loopback, 16) == 0;
}

bool an_interface_has(const ConnectionEnd& end) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) {
    return true; // the kernel does not tell
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(
      all, &freeifaddrs);
  for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != end.family) {
      continue;
    }
    sockaddr_storage storage{};
    std::memcpy(
        &storage,
        at->ifa_addr,
        end.family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (to_end(storage).has_address_of(end)) {
      return true;
    }
  }
  return false;
}

/// Whether the kernel lets sockets have addresses that are not the host's.
bool may_bind_any(int family) {
  char value = '0';
  std::ifstream(
      family == AF_INET ? "/proc/sys/net/ipv4/ip_nonlocal_bind"
                        : "/proc/sys/net/ipv6/ip_nonlocal_bind") >>
      value;
  return value != '0';
}

bool can_bind(const ConnectionEnd& end) {
  const UniqueFd trial(socket(end.family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_in);
  if (end.family == AF_INET) {
    auto& ipv4 = reinterpret_cast<sockaddr_in&>(storage);
    ipv4.sin_family = AF_INET;
    ipv4.sin_addr.s_addr = end.address[0];
  } else {
    auto& ipv6 = reinterpret_cast<sockaddr_in6&>(storage);
    ipv6.sin6_family = AF_INET6;
    std::memcpy(&ipv6.sin6_addr, end.address.data(), sizeof ipv6.sin6_addr);
    ipv6.sin6_scope_id = end.interface;
    length = sizeof(sockaddr_in6);
  }
  return bind(trial.get(), reinterpret_cast<sockaddr*>(&storage), length) == 0;
}

bool is_of_this_host(const ConnectionEnd& peer, const ConnectionEnd& own) {
  return is_loopback_end(peer) || peer.has_address_of(own) ||
      (can_bind(peer) &&
       (!may_bind_any(peer.family) || an_interface_has(peer)));
}

// ---- Users

uid_t overflow_user() {
  uid_t uid = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> uid;
  return uid;
}

/// Whether each user of the machine has a number in this user namespace.
bool has_all_users() {
  std::ifstream map("/proc/self/uid_map");
  uint64_t inside = 0;
  uint64_t outside = 0;
  uint64_t count = 0;
  if (!map) {
    return true; // no user namespaces, as far as can be seen
  }
  return map >> inside >> outside >> count && inside == 0 && outside == 0 &&
      count >= 0xFFFFFFFF;
}

PeerOwner owner_of(const SocketEntry& entry) {
  if (entry.inode == 0) {
    return {PeerOwner::Kind::kGone};
  }
  if (entry.uid == overflow_user() && !has_all_users()) {
    return {PeerOwner::Kind::kUnmapped};
  }
  return {PeerOwner::Kind::kUser, entry.uid};
}

struct Ends {
  ConnectionEnd peer;
  ConnectionEnd own;
};

std::optional<Ends> ends_of(int socket) {
  sockaddr_storage peer{};
  sockaddr_storage own{};
  socklen_t peer_length = sizeof peer;
  socklen_t own_length = sizeof own;
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_length) !=
          0 ||
      getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_length) !=
          0) {
    return std::nullopt;
  }
  return Ends{to_end(peer), to_end(own)};
}

/// Whether the peer has neither closed nor reset the connection. A reset may be
/// under way for a moment after its sender has vanished from the tables.
bool stays_open(int socket) {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  tcp_info info{};
  socklen_t length = sizeof info;
  return getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
      info.tcpi_state == TCP_ESTABLISHED;
}

/// A connection of this process with itself.
struct Pair {
  UniqueFd listener;
  UniqueFd client;
  UniqueFd server;
};

Pair connect_to_self() {
  Pair pair{
      .listener = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      .client = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      .server = UniqueFd()};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  if (bind(pair.listener.get(), generic, length) == 0 &&
      listen(pair.listener.get(), 1) == 0 &&
      getsockname(pair.listener.get(), generic, &length) == 0 &&
      connect(pair.client.get(), generic, length) == 0) {
    pair.server =
        UniqueFd(accept4(pair.listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  return pair;
}

} // namespace

bool PeerOwner::is_ours() const {
  return kind == Kind::kUser && (uid == geteuid() || uid == 0);
}

PeerOwner owner_of_peer(int socket) {
  const auto ends = ends_of(socket);
  if (!ends) {
    return {PeerOwner::Kind::kGone};
  }
  const auto& [peer, own] = *ends;
  for (const auto look : {look_in_sock_diag, look_in_proc}) {
    const SocketAnswer answer = look(peer, own);
    if (answer.entry) {
      return owner_of(*answer.entry);
    }
    if (answer.works && is_of_this_host(peer, own)) {
      return {
          stays_open(socket) ? PeerOwner::Kind::kTranslated
                             : PeerOwner::Kind::kGone};
    }
    if (answer.works) {
      return {PeerOwner::Kind::kElsewhere};
    }
  }
  return {
      is_of_this_host(peer, own) ? PeerOwner::Kind::kUntold
                                 : PeerOwner::Kind::kElsewhere};
}

std::string describe_owner_check() {
  constexpr const char* kAdvice =
      " are let in with a warning: set TESSERA_STORE_SECRET where others use this machine";
  const Pair pair = connect_to_self();
  const auto ends = ends_of(pair.server.get());
  if (!ends) {
    return "not known: no connection on 127.0.0.1";
  }
  const bool by_sock_diag =
      look_in_sock_diag(ends->peer, ends->own).entry.has_value();
  if (!by_sock_diag && !look_in_proc(ends->peer, ends->own).entry) {
    return std::string(
               "neither sock_diag nor /proc/net/tcp tells who connects: all local users") +
        kAdvice;
  }
  const std::string how =
      by_sock_diag ? " (by sock_diag)" : " (by /proc/net/tcp)";
  if (!has_all_users()) {
    return "other users of this user namespace are kept out" + how +
        "; those outside of it" + kAdvice;
  }
  return "other users are kept out" + how;
}

} // namespace tessera::comm
