// Stores of ours and of c10d's, and what they throw.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/store/store.h"

namespace tessera::comm {

using Bytes = std::vector<uint8_t>;

inline Bytes bytes(std::string_view text) {
  return {text.begin(), text.end()};
}

/// The text of an error of this type; other errors are passed on.
template <class Error>
std::string error_of_type(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline StorePtr c10d_store(const StoreEndpoint& endpoint, bool is_server) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(endpoint.port);
  options.isServer = is_server;
  options.waitWorkers = false;
  options.timeout = std::chrono::seconds(30);
  return c10::make_intrusive<c10d::TCPStore>(endpoint.address, options);
}

/// A store and one client of it.
struct StorePair {
  StorePtr server;
  StorePtr client;
};

inline StorePair make_pair(
    const std::string& server,
    const std::string& client) {
  StoreEndpoint endpoint{"127.0.0.1", 0};
  StorePair pair;
  if (server == "ours") {
    pair.server = host_store(endpoint, std::chrono::seconds(30));
  } else {
    pair.server = c10d_store(endpoint, true);
    endpoint.port = static_cast<const c10d::TCPStore&>(*pair.server).getPort();
  }
  pair.client = client == "ours"
      ? connect_store(endpoint, std::chrono::seconds(30))
      : c10d_store(endpoint, false);
  return pair;
}

} // namespace tessera::comm
