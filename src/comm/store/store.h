// The key-value store through which ranks find each other.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Milliseconds = std::chrono::milliseconds;

struct StoreEndpoint {
  std::string address;
  int port = 0;

  /// HOST:PORT, or [HOST]:PORT where the host is an IPv6 address.
  std::string to_string() const;
  /// The endpoint that to_string() writes as `text`; nothing if `text` is
  /// neither form.
  static std::optional<StoreEndpoint> parse(std::string_view text);
};

/// Hosts a store in this process at `endpoint`; port 0 takes a free port. With
/// a loopback address the store listens on that address alone, else on all
/// interfaces, over IPv6 and IPv4. `endpoint.port` is the port in use
/// afterwards. Throws c10::DistNetworkError if the port is taken.
///
/// Here and below: TESSERA_STORE_SECRET is the secret of the store, if set.
StorePtr host_store(StoreEndpoint& endpoint, Milliseconds timeout);

/// Connects to a store, trying again until `timeout`, also where name servers
/// do not know the host yet. `advice` is what the error tells the user to look
/// at.
StorePtr connect_store(
    const StoreEndpoint& endpoint,
    Milliseconds timeout,
    std::string_view advice =
        "Is rank 0 (or its launcher) running there, and are MASTER_ADDR and MASTER_PORT the same everywhere?");

/// Each rank's `value`, by rank. Collective through the store alone; throws
/// TimeoutError that names `call` and the ranks that never came, PeerLostError
/// if the store is lost. `names` are the numbers that messages use for the
/// ranks.
std::vector<std::string> exchange(
    c10d::Store& store,
    const std::string& key,
    int rank,
    const std::vector<int>& names,
    const std::string& value,
    Milliseconds timeout,
    const std::string& call);

} // namespace tessera::comm
