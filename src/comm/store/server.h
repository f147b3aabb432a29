#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <thread>

#include "base/unique_fd.h"

namespace tessera::comm {

/// What clients can make a store hold.
struct StoreLimits {
  /// Keys and values, and who waits for which. A request beyond it cuts its
  /// client off. Gloo's addresses grow with the square of the ranks: this is
  /// enough for some thousands.
  size_t stored_bytes = size_t{1} << 30;
  /// Requests that are half there and answers that wait, of all clients. Beyond
  /// it who holds the most is cut off.
  size_t buffered_bytes = size_t{512} << 20;
  /// Connections that have not greeted, or a quarter of the descriptors that
  /// the process may have. Beyond it who waited longest has to go.
  size_t strangers = 256;
};

/// The key-value store itself, on a thread of its own until destruction.
///
/// c10d's server looks up the host name of each client that comes, on the one
/// thread that serves them all: where name servers are slow or out of reach,
/// nobody is served meanwhile. Ours asks for no names.
///
/// It serves this user and root. A connection that comes from this host is
/// looked at before a byte of it is read (see [Note: whose connection]); those
/// of other users are closed. Whose it is cannot always be told; then it is
/// served, with one warning. With a secret it is the proof of it that counts,
/// wherever a connection comes from; see [Note: the secret]. Connections that
/// never greet, and what clients make the store hold, are limited.
class StoreServer {
 public:
  /// Serves who connects to `listener`, a socket that listens. Throws
  /// std::system_error.
  StoreServer(
      UniqueFd listener,
      std::string secret,
      const StoreLimits& limits = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  const pid_t owner_; // a forked child has no such thread
  UniqueFd stop_; // eventfd: ends the thread
  std::thread thread_;
};

} // namespace tessera::comm
