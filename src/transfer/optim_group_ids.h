// Parameter groups with an optimizer's numbers in place of names.
#pragma once

#include <tessera/state/state_dict.h>

#include <string_view>

#include "transfer/model_params.h"
#include "transfer/optim_tensors.h"

namespace tessera::transfer {

/// A copy of `groups` whose "params" are numbers of the optimizer's tensors, in
/// ascending order. Throws c10::ValueError for a name that the model or the
/// optimizer does not have.
StateList with_ids(
    const StateList& groups,
    const ModelParams& model,
    const OptimTensors& tensors,
    std::string_view call);

} // namespace tessera::transfer
