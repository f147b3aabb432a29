#include "cli/hosted_run.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <chrono>

#include "cli/store_channel.h"
#include "comm/store/store.h"
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
