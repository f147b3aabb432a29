#include "comm/store/peer_owner.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>

#include "base/unique_fd.h"

namespace tessera::comm {
namespace {

/// One end of a connection. IPv4 in IPv6 is IPv4.
struct End {
  int family = AF_INET;
  std::array<uint32_t, 4>
      address{}; // as on the wire; the first four bytes are IPv4
  uint16_t port = 0; // as on the wire
  uint32_t interface = 0; // of a link-local address

  bool has_address_of(const End& other) const {
    return family == other.family && address == other.address;
  }
};

End to_end(const sockaddr_storage& storage) {
  End end;
  if (storage.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(storage);
    end.address[0] = ipv4.sin_addr.s_addr;
    end.port = ipv4.sin_port;
    return end;
  }
  const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(storage);
  end.port = ipv6.sin6_port;
  std::memcpy(end.address.data(), &ipv6.sin6_addr, sizeof ipv6.sin6_addr);
  if (IN6_IS_ADDR_V4MAPPED(&ipv6.sin6_addr)) {
    end.address = {end.address[3]};
  } else {
    end.family = AF_INET6;
    end.interface = ipv6.sin6_scope_id;
  }
  return end;
}

/// What a table of the kernel says about one end of a connection.
struct Entry {
  uid_t uid = 0;
  uint64_t inode = 0; // 0: no process has the socket
};
struct Answer {
  std::optional<Entry> entry;
  bool works = false; // the table has the entry that it must have
};

// ---- sock_diag

/// A socket whose near end is `near`: connected to `far`, or one that listens
/// in its place.
std::optional<inet_diag_msg> ask_sock_diag(const End& near, const End& far) {
  const UniqueFd netlink(
      socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  struct {
    nlmsghdr header{};
    inet_diag_req_v2 request{};
  } question;
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.request.sdiag_family = static_cast<uint8_t>(near.family);
  question.request.sdiag_protocol = IPPROTO_TCP;
  question.request.idiag_states = ~0u;
  inet_diag_sockid& id = question.request.id;
  id.idiag_sport = near.port;
  id.idiag_dport = far.port;
  std::copy(near.address.begin(), near.address.end(), id.idiag_src);
  std::copy(far.address.begin(), far.address.end(), id.idiag_dst);
  id.idiag_if = near.interface;
  id.idiag_cookie[0] = INET_DIAG_NOCOOKIE;
  id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  if (!netlink ||
      send(netlink.get(), &question, sizeof question, 0) !=
          static_cast<ssize_t>(sizeof question)) {
    return std::nullopt;
  }
  // The answer is there before send() returns; waiting might never end.
  alignas(nlmsghdr) char bytes[8192];
  const ssize_t count = recv(netlink.get(), bytes, sizeof bytes, MSG_DONTWAIT);
  if (count < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(inet_diag_msg)))) {
    return std::nullopt;
  }
  nlmsghdr header{};
  std::memcpy(&header, bytes, sizeof header);
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY) {
    return std::nullopt;
  }
  inet_diag_msg found{};
  std::memcpy(&found, bytes + NLMSG_HDRLEN, sizeof found);
  return found;
}

Answer look_in_sock_diag(const End& peer, const End& own) {
  const auto found = ask_sock_diag(peer, own);
  if (found && found->idiag_state != TCP_LISTEN &&
      found->id.idiag_dport == own.port) {
    return {Entry{found->idiag_uid, found->idiag_inode}, true};
  }
  // The table works if it has our end of the connection, or the listener.
  return {std::nullopt, ask_sock_diag(own, peer).has_value()};
}

// ---- /proc/net/tcp

std::string hex(const uint32_t* words, int count) {
  std::string text;
  char word[9];
  for (int i = 0; i < count; ++i) {
    std::snprintf(word, sizeof word, "%08" PRIX32, words[i]);
    text += word;
  }
  return text;
}

std::string port_text(const End& end) {
  char text[6];
  std::snprintf(text, sizeof text, ":%04X", ntohs(end.port));
  return text;
}

/// As the table writes it. `of_ipv6`: in tcp6.
std::string row_text(const End& end, bool of_ipv6) {
  if (!of_ipv6) {
    return hex(end.address.data(), 1) + port_text(end);
  }
  std::array<uint32_t, 4> address = end.address;
  if (end.family == AF_INET) {
    address = {0, 0, htonl(0xFFFF), end.address[0]};
  }
  return hex(address.data(), 4) + port_text(end);
}

/// Adds to `answer` what one of the two tables has.
void look_in_table(
    const char* path,
    bool of_ipv6,
    const End& peer,
    const End& own,
    Answer& answer) {
  std::ifstream table(path);
  const std::string theirs = row_text(peer, of_ipv6);
  const std::string ours = row_text(own, of_ipv6);
  const std::string our_port = port_text(own);
  for (std::string line; std::getline(table, line);) {
    std::istringstream in(line);
    std::string number, near, far, state, queues, timer, retries, timeout;
    Entry entry;
    in >> number >> near >> far >> state >> queues >> timer >> retries >>
        entry.uid >> timeout >> entry.inode;
    if (in.fail()) {
      continue;
    }
    // Our end of the connection, or the socket that listened for it.
    answer.works = answer.works || near.ends_with(our_port);
    if (near == theirs && far == ours) {
      answer.entry = entry;
    }
  }
}

Answer look_in_proc(const End& peer, const End& own) {
  Answer answer;
  if (peer.family == AF_INET) {
    look_in_table("/proc/net/tcp", false, peer, own, answer);
  }
  look_in_table("/proc/net/tcp6", true, peer, own, answer);
  return answer;
}

// ---- Addresses

bool is_loopback_end(const End& end) {
  if (end.family == AF_INET) {
    return ntohl(end.address[0]) >> 24 == 127;
  }
  return std::memcmp(end.address.data(), &in6addr_loopback, 16) == 0;
}

bool an_interface_has(const End& end) {
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

bool can_bind(const End& end) {
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

bool is_of_this_host(const End& peer, const End& own) {
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

PeerOwner owner_of(const Entry& entry) {
  if (entry.inode == 0) {
    return {PeerOwner::Kind::kGone};
  }
  if (entry.uid == overflow_user() && !has_all_users()) {
    return {PeerOwner::Kind::kUnmapped};
  }
  return {PeerOwner::Kind::kUser, entry.uid};
}

struct Ends {
  End peer;
  End own;
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
    const Answer answer = look(peer, own);
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
