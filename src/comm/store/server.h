#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <thread>

#include "base/unique_fd.h"

namespace tessera::comm {

/// What clients can make a store hold.
struct StoreLimits {
  /// Keys and values, and which client waits for which key. A client whose
  /// request goes beyond this limit is cut off. Gloo's addresses grow with the
  /// square of the ranks: the default is enough for some thousand ranks.
  size_t stored_bytes = size_t{1} << 30;
  /// Requests that have arrived in part and answers that were not read yet, of
  /// all clients. Beyond this limit the client that holds the most is cut off.
  size_t buffered_bytes = size_t{512} << 20;
  /// Connections that have not greeted; at most a quarter of the descriptors
  /// that the process may have. Beyond this limit the oldest of them is closed.
  size_t strangers = 256;
};

/// The key-value store itself, on a thread of its own until destruction.
///
/// c10d's server looks up the host name of each client that comes, on the one
/// thread that serves them all: where name servers are slow or out of reach,
/// nobody is served meanwhile. This server looks up no names.
///
/// The server serves this user and root. The owner of a connection from this
/// host is looked up before a byte is read (see [Note: whose connection]);
/// connections of other users are closed. A connection whose owner cannot be
/// told is served, with one warning. With a secret, only the proof of the
/// secret counts, wherever a connection comes from; see [Note: the secret].
/// Connections that never greet, and the bytes that clients make the store
/// hold, are limited.
class StoreServer {
 public:
  /// Serves every client that connects to `listener`, a listening socket.
  /// Throws std::system_error.
  StoreServer(
      UniqueFd listener,
      std::string secret,
      const StoreLimits& limits = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  // Constant after construction. The thread has the rest of the state to
  // itself.
  const pid_t owner_; // a forked child does not have the thread
  UniqueFd stop_; // eventfd: ends the thread
  std::thread thread_;
};

} // namespace tessera::comm
