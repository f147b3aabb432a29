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
  /// Only rank 0's `dict` counts, and has full tensors.
  bool from_rank0 = false;
  /// Parameters that do not require gradients need not be in it.
  bool ignore_frozen = false;
};

/// Checks everything on all ranks, then writes. See tessera::load_state_dict.
IncompatibleKeys write_model_state(
    torch::nn::Module& module,
    const WriteRequest& request);

/// Throws c10::ValueError that names all of them, with the name that may have
/// been meant for each; returns if there are none.
void refuse_incompatible(
    std::string_view call,
    const IncompatibleKeys& keys,
    const std::vector<std::string>& expected);

} // namespace tessera::transfer
