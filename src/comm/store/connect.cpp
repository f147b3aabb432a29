#include "comm/store/connect.h"

#include <tessera/error.h>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/store/peer_owner.h"
#include "comm/store/secret.h"
#include "comm/store/stream.h"
#include "comm/store/wire.h"

namespace tessera::comm {
namespace {

using wire::Message;
using wire::Query;
using Clock = std::chrono::steady_clock;

/// How long one address gets to accept a connection, at most.
constexpr Milliseconds kConnectPatience{1000};
/// How long a store gets to answer the greeting, at least.
constexpr Milliseconds kGreeting{500};

/// A socket that connects to a port of this host on which nobody listens may be
/// connected to itself.
bool is_connected_to_itself(int fd) {
  sockaddr_storage near{};
  sockaddr_storage far{};
  socklen_t near_size = sizeof near;
  socklen_t far_size = sizeof far;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&near), &near_size) == 0 &&
      getpeername(fd, reinterpret_cast<sockaddr*>(&far), &far_size) == 0 &&
      near_size == far_size && std::memcmp(&near, &far, near_size) == 0;
}

/// 0, or the errno of the attempt.
int reach(int fd, const addrinfo& address, Deadline deadline) {
  if (::connect(fd, address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) {
      return errno;
    }
    const auto patience = std::min(deadline, Clock::now() + kConnectPatience);
    if (const int error = wait_for(fd, POLLOUT, patience)) {
      return error;
    }
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      return error;
    }
  }
  if (is_connected_to_itself(fd)) {
    return ECONNREFUSED;
  }
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  return 0;
}

/// See [Note: the secret].
void prove(StoreStream& stream, const std::string& secret) {
  const Nonce mine = make_nonce();
  Message hello;
  hello.number(wire::kHello);
  stream.send_bytes(hello.bytes() + std::string(view_of(mine)));
  const auto theirs = stream.array<Nonce>();
  const Proofs proofs(secret, mine, theirs);
  if (!is_same(stream.array<Digest>(), proofs.of_host())) {
    raise<c10::DistNetworkError>(
        {.call = "init"},
        "the store does not know this process's TESSERA_STORE_SECRET. Give all processes of the run the same one.");
  }
  Message proof;
  proof.number(wire::kProof);
  const Digest digest = proofs.of_client();
  stream.send_bytes(proof.bytes() + std::string(view_of(digest)));
}

/// Empty, or why this is not a store.
std::string greet(int fd, const std::string& secret, Deadline deadline) {
  constexpr const char* kNoStore =
      "something listens there, but it does not answer as a store";
  const auto nonce = static_cast<uint32_t>(getpid());
  try {
    StoreStream stream(fd, std::max(deadline, Clock::now() + kGreeting));
    if (secret.empty()) {
      stream.send(Message(Query::kValidate).number(wire::kMagic));
    } else {
      prove(stream, secret);
    }
    stream.send(Message(Query::kPing).number(nonce));
    return stream.number<uint32_t>() == nonce ? "" : kNoStore;
  } catch (const StreamSilent&) {
    return kNoStore;
  } catch (const StreamClosed& error) {
    return fmt::format(
        "{}; a store does so with processes of other users, and with those that do not have its TESSERA_STORE_SECRET",
        error.what());
  }
}

/// Empty, or who owns the store. Only after the store has answered: before, no
/// process has accepted the connection.
std::string find_stranger(int fd) {
  const PeerOwner owner = owner_of_peer(fd);
  if (owner.kind == PeerOwner::Kind::kGone) {
    return "it closed the connection";
  }
  if (owner.kind == PeerOwner::Kind::kUser && !owner.is_ours()) {
    return fmt::format(
        "user {} listens there, and this process is of user {}",
        owner.uid,
        geteuid());
  }
  return "";
}

std::string meet(int fd, const std::string& secret, Deadline deadline) {
  const std::string problem = greet(fd, secret, deadline);
  return problem.empty() && secret.empty() ? find_stranger(fd) : problem;
}

} // namespace

UniqueFd connect_to_store(
    const AddressList& addresses,
    const std::string& secret,
    Deadline deadline,
    std::string& problem) {
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    UniqueFd socket(
        ::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int error = socket ? reach(socket.get(), *at, deadline) : errno;
    // What listens on this address may be another program; the store may be on
    // the next.
    const Deadline patience = at->ai_next == nullptr
        ? deadline
        : std::min(deadline, Clock::now() + kConnectPatience);
    problem = error == 0 ? meet(socket.get(), secret, patience)
                         : std::strerror(error);
    if (problem.empty()) {
      return socket;
    }
  }
  return UniqueFd();
}

} // namespace tessera::comm
