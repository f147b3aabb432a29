// Whose process is at the other end of a TCP connection.
#pragma once

#include <sys/types.h>

#include <string>

namespace tessera::comm {

/// [Note: whose connection]
///
/// TCP has no SO_PEERCRED. But the other end of a connection inside one host is
/// a socket of the same network namespace, and the kernel tells who made it:
/// through sock_diag (netlink), or in /proc/net/tcp and tcp6. The kernel tells
/// a number in our user namespace. A user that has no number there is reported
/// as the overflow user (65534), as is a real user of that number.
///
/// A socket that its process has closed no longer belongs to any user, and some
/// kernels report user 0 for it: such a socket counts as gone, never as root's.
/// A peer that is alive and still in no table is behind a translation of
/// addresses (NAT).
struct PeerOwner {
  enum class Kind {
    kElsewhere, // the peer is on another host
    kUser, // on this host, of user `uid`
    kUnmapped, // on this host, of a user without a number in this namespace
    kUntold, // on this host; the kernel does not tell the user
    kTranslated, // on this host by its address, which NAT has put there
    kGone, // on this host; closed already
  };

  Kind kind = Kind::kElsewhere;
  uid_t uid = 0;

  /// The peer belongs to this user or to root.
  bool is_ours() const;
  bool is_unknown() const {
    return kind == Kind::kUnmapped || kind == Kind::kUntold ||
        kind == Kind::kTranslated;
  }
};

/// The owner of the peer of a connected TCP socket. Nothing is sent to the
/// peer.
PeerOwner owner_of_peer(int socket);

/// For people: how well this process can tell who connects to it.
std::string describe_owner_check();

} // namespace tessera::comm
