// Optimizer state of one rank's optimizer under the names of the model.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>

#include <torch/nn/module.h>

#include <optional>
#include <string_view>

#include "transfer/optim_tensors.h"

namespace tessera::transfer {

struct SaveRequest {
  std::string_view call;
  const StateDict& osd; // the state dict of this rank's optimizer
  const TensorGroups& tensors; // the parameters of this rank's optimizer
  bool is_full = true; // false: sharded
  bool rank0_only = false;
  bool offload_to_cpu = true;
  std::optional<Group> group = std::nullopt; // the group that rank 0 is of
};

/// A state dict with the model's names as keys. With rank0_only it is empty on
/// all ranks but 0. Collective.
StateDict save_optim_state(
    torch::nn::Module& model,
    const SaveRequest& request);

} // namespace tessera::transfer
