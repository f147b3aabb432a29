// The kernel's tables of connections: whose process has the other end.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>

namespace tessera::comm {

/// One end of a connection. IPv4 in IPv6 is IPv4.
struct ConnectionEnd {
  int family = AF_INET;
  std::array<uint32_t, 4>
      address{}; // as on the wire; the first four bytes are IPv4
  uint16_t port = 0; // as on the wire
  uint32_t interface = 0; // of a link-local address

  bool has_address_of(const ConnectionEnd& other) const {
    return family == other.family && address == other.address;
  }
};

ConnectionEnd to_end(const sockaddr_storage& storage);

/// What a table of the kernel says about one end of a connection.
struct SocketEntry {
  uid_t uid = 0;
  uint64_t inode = 0; // 0: no process has the socket
};
struct SocketAnswer {
  std::optional<SocketEntry> entry;
  bool works = false; // the table has the entry that it must have
};

/// Asks the kernel (sock_diag).
SocketAnswer look_in_sock_diag(
    const ConnectionEnd& peer,
    const ConnectionEnd& own);
/// Reads /proc/net/tcp and tcp6.
SocketAnswer look_in_proc(const ConnectionEnd& peer, const ConnectionEnd& own);

} // namespace tessera::comm
