#include "comm/store/socket_tables.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "base/unique_fd.h"

namespace tessera::comm {
namespace {

// ---- sock_diag

/// A socket whose near end is `near`: connected to `far`, or one that listens
/// in its place.
std::optional<inet_diag_msg> ask_sock_diag(
    const ConnectionEnd& near,
    const ConnectionEnd& far) {
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

std::string port_text(const ConnectionEnd& end) {
  char text[6];
  std::snprintf(text, sizeof text, ":%04X", ntohs(end.port));
  return text;
}

/// As the table writes it. `of_ipv6`: in tcp6.
std::string row_text(const ConnectionEnd& end, bool of_ipv6) {
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
    const ConnectionEnd& peer,
    const ConnectionEnd& own,
    SocketAnswer& answer) {
  std::ifstream table(path);
  const std::string theirs = row_text(peer, of_ipv6);
  const std::string ours = row_text(own, of_ipv6);
  const std::string our_port = port_text(own);
  for (std::string line; std::getline(table, line);) {
    std::istringstream in(line);
    std::string number, near, far, state, queues, timer, retries, timeout;
    SocketEntry entry;
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

} // namespace

ConnectionEnd to_end(const sockaddr_storage& storage) {
  ConnectionEnd end;
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

SocketAnswer look_in_sock_diag(
    const ConnectionEnd& peer,
    const ConnectionEnd& own) {
  const auto found = ask_sock_diag(peer, own);
  if (found && found->idiag_state != TCP_LISTEN &&
      found->id.idiag_dport == own.port) {
    return {SocketEntry{found->idiag_uid, found->idiag_inode}, true};
  }
  // The table works if it has our end of the connection, or the listener.
  return {std::nullopt, ask_sock_diag(own, peer).has_value()};
}

SocketAnswer look_in_proc(const ConnectionEnd& peer, const ConnectionEnd& own) {
  SocketAnswer answer;
  if (peer.family == AF_INET) {
    look_in_table("/proc/net/tcp", false, peer, own, answer);
  }
  look_in_table("/proc/net/tcp6", true, peer, own, answer);
  return answer;
}

} // namespace tessera::comm
