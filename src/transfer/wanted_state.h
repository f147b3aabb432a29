// The state that the tensors of an optimizer are to have after a load.
#pragma once

#include <tessera/state/state_dict.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transfer/model_params.h"

namespace tessera::transfer {

/// One state of a leaf: a plain value, or parts of the tensors of the leaf's
/// members, where null means zeros.
struct WantedState {
  std::string name;
  std::optional<at::ScalarType> dtype; // nothing: a plain value
  std::vector<const StateValue*> by_member; // of tensors
  StateValue value;
};

/// What one leaf of the model, a tensor of an optimizer, is to have.
struct WantedLeaf {
  std::vector<const ModelParam*> members;
  std::vector<WantedState> states;
};

/// The leaves of the model that `state` has entries for, in the model's order.
/// Throws c10::ValueError if values do not fit their parameters, or members of
/// one flat parameter do not fit together. The result points into `model` and
/// `state`.
std::vector<WantedLeaf> wanted_leaves(
    const ModelParams& model,
    const StateDict& state,
    std::string_view call);

} // namespace tessera::transfer
