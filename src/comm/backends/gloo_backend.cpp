#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <gloo/context.h>

#include <utility>

#include "comm/backends/backends.h"

namespace tessera::comm {
namespace {

class GlooBackend : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  /// Closes the connections, so that peers that wait in the same operation
  /// fail at once instead of at their timeout.
  void abort() override {
    for (const auto& context : contexts_) {
      context->closeConnections();
    }
  }
};

} // namespace

CarrierPtr make_gloo_backend(const BackendConfig& config) {
  auto options = c10d::ProcessGroupGloo::Options::create(config.timeout);
  options->devices = {
      c10d::ProcessGroupGloo::createDeviceForHostname(config.address)};
  auto backend = c10::make_intrusive<GlooBackend>(
      config.store, config.rank, config.size(), options);
  // Waits until all ranks are connected: a rank that dropped its group at once
  // would break the connections that a slower rank is still making.
  exchange(
      *config.store,
      "gloo/connected",
      config.rank,
      config.global_ranks,
      "",
      config.timeout,
      config.call);
  return carry_over(
      std::move(backend),
      {.averages = false, .c10d_type = c10d::ProcessGroup::BackendType::GLOO});
}

} // namespace tessera::comm
