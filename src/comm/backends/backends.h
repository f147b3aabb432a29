// Makers of the backends that a group can stand on.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

#include "comm/backends/carrier.h"
#include "comm/store/store.h"
#include "comm/wire_speed.h"

namespace tessera::comm {

/// What every maker needs. `store` belongs to the group alone.
struct BackendConfig {
  StorePtr store;
  int rank = 0;
  std::vector<int> global_ranks; // by rank of the group
  Milliseconds timeout{0};
  std::string address; // this host's, numeric, as the peers reach it
  int ranks_on_host = 1; // of the whole world: does each rank have a core?
  WireSpeed fake_wire; // of the fake backend
  std::string call = "init"; // for messages: the call that makes the group

  int size() const {
    return static_cast<int>(global_ranks.size());
  }
};

CarrierPtr make_gloo_backend(const BackendConfig& config);

/// The ranks of a group cannot map memory together here. The text says which
/// rank, and why; it is the same on every rank.
class CannotShareMemory : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

/// Throws on every rank of the group or on none: a rank that cannot map the
/// memory says so to the others, and all throw CannotShareMemory.
CarrierPtr make_shm_backend(const BackendConfig& config);

/// The backend of a rank whose peers do not exist: gathers repeat this rank's
/// input, reductions leave the input as it is, and so do broadcasts, scatters
/// and messages from the others. They take the time that config.fake_wire says.
/// One serves the tensors of one kind of device.
CarrierPtr make_fake_backend(
    const BackendConfig& config,
    c10::DeviceType device);

/// Whether this build has NCCL. Without NCCL make_nccl_backend() throws an
/// error that says how to build with it.
bool nccl_is_built();
CarrierPtr make_nccl_backend(const BackendConfig& config);

} // namespace tessera::comm
