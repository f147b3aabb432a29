#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backends.h"

namespace tessera::comm {

BackendPtr make_gloo_backend(const BackendConfig& config) {
  auto options = c10d::ProcessGroupGloo::Options::create(config.timeout);
  options->devices = {
      c10d::ProcessGroupGloo::createDeviceForHostname(config.address)};
  return c10::make_intrusive<c10d::ProcessGroupGloo>(
      config.store, config.rank, config.size(), options);
}

} // namespace tessera::comm
