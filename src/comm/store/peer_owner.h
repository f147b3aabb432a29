// Whose process is at the other end of a TCP connection.
#pragma once

#include <sys/types.h>

#include <string>

namespace tessera::comm {

/// [Note: whose connection]
///
/// TCP has no SO_PEERCRED. But the other end of a connection inside one host is
/// a socket of the same network namespace, and the kernel tells who made it:
/// through sock_diag (netlink), or in /proc/net/tcp and tcp6. What it tells is
/// a number in our user namespace. A user that has none there is reported as
/// the overflow user (65534), as is a real user of that number.
///
/// A socket that its process has closed belongs to nobody any more, and some
/// kernels call that user 0: it counts as gone, never as root's. A peer that is
/// alive and still in no table is behind a translation of addresses (NAT).
struct PeerOwner {
  enum class Kind {
    kElsewhere, // its address is not of this host
    kUser, // `uid`
    kUnmapped, // a user who has no number in this user namespace
    kUntold, // of this host; the kernel does not tell whose
    kTranslated, // of this host by its address, which NAT has put there
    kGone, // of this host; closed already
  };

  Kind kind = Kind::kElsewhere;
  uid_t uid = 0;

  /// This user's or root's.
  bool is_ours() const;
  bool is_unknown() const {
    return kind == Kind::kUnmapped || kind == Kind::kUntold ||
        kind == Kind::kTranslated;
  }
};

/// Of a connected TCP socket. Nothing is sent to the peer.
PeerOwner owner_of_peer(int socket);

/// For people: how well this process can tell who connects to it.
std::string describe_owner_check();

} // namespace tessera::comm
