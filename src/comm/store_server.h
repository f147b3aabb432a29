#pragma once

#include <sys/types.h>

#include <thread>

#include "unique_fd.h"

namespace tessera::comm {

/// The key-value store itself, on a thread of its own until destruction.
///
/// c10d's server looks up the host name of each client that comes, on the one
/// thread that serves them all: where name servers are slow or out of reach,
/// nobody is served meanwhile. Ours asks for no names.
class StoreServer {
 public:
  /// Serves who connects to `listener`, a socket that listens. Throws
  /// std::system_error.
  explicit StoreServer(UniqueFd listener);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  const pid_t owner_; // a forked child has no such thread
  UniqueFd stop_; // eventfd: ends the thread
  std::thread thread_;
};

} // namespace tessera::comm
