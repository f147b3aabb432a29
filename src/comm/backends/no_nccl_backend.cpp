// Stands in for nccl_backend.cpp where LibTorch has no CUDA or nccl.h is
// missing.
#include <tessera/error.h>

#include "comm/backends/backends.h"

namespace tessera::comm {

bool nccl_is_built() {
  return false;
}

CarrierPtr make_nccl_backend(const BackendConfig& config) {
  raise<c10::ValueError>(
      {.call = "init", .rank = config.global_ranks[0]},
      "this Tessera was built without NCCL. Build it against a LibTorch with CUDA (Torch_DIR) where nccl.h can be found, or choose the backend \"auto\".");
}

} // namespace tessera::comm
