// Dictionaries of one rank's optimizer, and of all parameters.
#pragma once

#include <tessera/state/state_dict.h>

#include <torch/optim/optimizer.h>

#include <vector>

namespace tessera::zero {

/// The state of `local`, by the numbers that its parameters have in `groups`,
/// which hold all of them. Tensors are shared.
StateDict with_global_ids(
    const torch::optim::Optimizer& local,
    const std::vector<torch::optim::OptimizerParamGroup>& groups);

/// The part that `local` can load of a dictionary of all parameters, which are
/// those in `groups`. Throws if anything in `dict` does not fit, also for
/// parameters of other ranks; state that is None counts as no state.
StateDict local_part_of(
    const StateDict& dict,
    const torch::optim::Optimizer& local,
    const std::vector<torch::optim::OptimizerParamGroup>& groups);

} // namespace tessera::zero
