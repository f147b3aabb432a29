#include "comm/store/admission.h"

#include <c10/util/Exception.h>

#include <unistd.h>

#include <utility>

#include "comm/store/peer_owner.h"

namespace tessera::comm {
namespace {

/// Why the owner of a connection is not known.
const char* reason_of(PeerOwner::Kind kind) {
  switch (kind) {
    case PeerOwner::Kind::kUnmapped:
      return "its user has no number in this user namespace";
    case PeerOwner::Kind::kTranslated:
      return "a translation of addresses (NAT) hides whose it is";
    default:
      return "neither sock_diag nor /proc/net/tcp tells whose it is";
  }
}

} // namespace

bool Admission::admits(int socket) {
  const PeerOwner owner = owner_of_peer(socket);
  if (owner.kind == PeerOwner::Kind::kGone) {
    return false;
  }
  if (owner.is_unknown()) {
    if (!std::exchange(has_told_of_unknown_, true)) {
      TORCH_WARN(
          "[store] a process of this host connected, and ",
          reason_of(owner.kind),
          ". It is served, as all such are. Set TESSERA_STORE_SECRET on all ranks where other users share this machine.");
    }
    return true;
  }
  const bool is_welcome =
      owner.kind == PeerOwner::Kind::kElsewhere || owner.is_ours();
  if (!is_welcome && !std::exchange(has_told_of_others_, true)) {
    TORCH_WARN(
        "[store] refused a connection of user ",
        owner.uid,
        " on this host: the store serves user ",
        geteuid(),
        " and root. It will refuse others without a word. Ranks of different users need TESSERA_STORE_SECRET.");
  }
  return is_welcome;
}

} // namespace tessera::comm
