#include "cli/hosted_run.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "comm/store/bounded_store.h"
#include "comm/store/store.h"
#include "launch/launcher_channel.h"
#include "launch/supervisor.h"

namespace tessera::cli {
namespace {

using comm::StoreEndpoint;
using comm::StorePtr;

constexpr comm::Milliseconds kStoreTimeout = std::chrono::minutes(10);

StoreEndpoint parse_endpoint(const std::string& text) {
  if (const auto endpoint = StoreEndpoint::parse(text)) {
    return *endpoint;
  }
  throw launch::InvalidRunOptions(fmt::format(
      "--rdzv-endpoint \"{}\" is not HOST:PORT. Give the address of node 0 as the other nodes reach it, with a free port: --rdzv-endpoint node0:29400, or [fd00::1]:29400 with an IPv6 address.",
      text));
}

constexpr const char* kConnectAdvice =
    "Is the launcher of node 0 running there, and is --rdzv-endpoint the same everywhere?";

/// The launchers' channel, in a store that node 0 hosts. Neither launch nor
/// comm may know the other, so the two meet here.
class StoreChannel : public launch::LauncherChannel {
 public:
  /// On node 0, which hosts the store.
  explicit StoreChannel(StorePtr store) : store_(std::move(store)) {}
  /// On the other nodes.
  explicit StoreChannel(StoreEndpoint endpoint)
      : store_(std::move(endpoint), kConnectAdvice) {}

  std::optional<std::string> connect() override {
    return store_.connect();
  }
  void set(const std::string& key, const std::string& bytes) override {
    store_.set(key, bytes);
  }
  void set_unless_set(const std::string& key, const std::string& bytes)
      override {
    store_.set_unless_set(key, bytes);
  }
  std::optional<std::string> get(const std::string& key) override {
    try {
      return store_.get(key);
    } catch (const comm::StoreSlow&) {
      throw launch::ChannelSlow();
    }
  }

 private:
  comm::BoundedStore store_;
};

} // namespace

int run_on_one_node(const launch::RunOptions& options) {
  StorePtr store; // of the attempt under way
  return launch::run(options, [&store](int) {
    StoreEndpoint endpoint{"127.0.0.1", 0};
    store = comm::host_store(endpoint, kStoreTimeout);
    return launch::Endpoint{endpoint.address, endpoint.port};
  });
}

int run_on_several_nodes(
    const launch::RunOptions& options,
    const std::string& endpoint_text) {
  StoreEndpoint endpoint = parse_endpoint(endpoint_text);
  StoreChannel channel = options.node_rank == 0
      ? StoreChannel(comm::host_store(endpoint, kStoreTimeout))
      : StoreChannel(endpoint);
  StorePtr store; // of the attempt under way, on node 0
  return launch::run(
      options,
      [&](int) {
        StoreEndpoint fresh{endpoint.address, 0};
        store = comm::host_store(fresh, kStoreTimeout);
        return launch::Endpoint{fresh.address, fresh.port};
      },
      &channel);
}

} // namespace tessera::cli
