// Makers of the c10d backends that a group can stand on.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

#include "comm/store/store.h"

namespace tessera::comm {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

/// What every maker needs. `store` is the group's own.
struct BackendConfig {
  StorePtr store;
  int rank = 0;
  std::vector<int> global_ranks; // by rank of the group
  Milliseconds timeout{0};
  std::string address; // numeric, of this host, as the peers reach it
  int ranks_on_host = 1; // of the whole world: do they have a core each?
  std::string call = "init"; // for messages: what the group is made by

  int size() const {
    return static_cast<int>(global_ranks.size());
  }
};

BackendPtr make_gloo_backend(const BackendConfig& config);

/// The ranks of a group cannot map memory together here. The text says which
/// rank, and why; it is the same on every rank.
class CannotShareMemory : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

/// Throws on every rank of the group or on none: a rank that cannot map the
/// memory says so to the others, and all throw CannotShareMemory.
BackendPtr make_shm_backend(const BackendConfig& config);

/// Of a rank among others that do not exist: gathers repeat this rank's input,
/// reductions leave it as it is.
BackendPtr make_fake_backend(const BackendConfig& config);

/// Whether this build has NCCL. Without it make_nccl_backend throws and says
/// how to get it.
bool nccl_is_built();
BackendPtr make_nccl_backend(const BackendConfig& config);

} // namespace tessera::comm
