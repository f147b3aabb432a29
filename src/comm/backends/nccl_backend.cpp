#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/backends/backends.h"
#include "comm/backends/c10d_carrier.h"

namespace tessera::comm {

bool nccl_is_built() {
  return true;
}

CarrierPtr make_nccl_backend(const BackendConfig& config) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = config.timeout;
  for (int rank : config.global_ranks) {
    options->global_ranks_in_group.push_back(static_cast<uint64_t>(rank));
  }
  return std::make_shared<C10dCarrier>(
      c10::make_intrusive<c10d::ProcessGroupNCCL>(
          config.store, config.rank, config.size(), options),
      Capabilities{.c10d_type = c10d::ProcessGroup::BackendType::NCCL});
}

} // namespace tessera::comm
