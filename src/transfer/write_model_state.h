// From a state dict into a model.
#pragma once

#include <tessera/state/state_dict.h>
#include <tessera/transfer/model_state.h>

#include <torch/nn/module.h>

#include <string_view>

namespace tessera::transfer {

struct WriteRequest {
  std::string_view call;
  const StateDict& dict;
  bool strict = true;
  /// `dict` is in the form of LocalStateDict.
  bool is_local = false;
  /// Only rank 0's `dict` is used, and it has full tensors.
  bool from_rank0 = false;
  /// Parameters that do not require gradients may be missing in `dict`.
  bool ignore_frozen = false;
};

/// Checks everything on all ranks, then writes. See tessera::load_state_dict.
IncompatibleKeys write_model_state(
    torch::nn::Module& module,
    const WriteRequest& request);

} // namespace tessera::transfer
