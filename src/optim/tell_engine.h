// What the engine learns of optimizers.
#pragma once

#include <torch/optim/optimizer.h>

#include <vector>

namespace tessera::optim {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

/// The optimizer of these groups makes a step; see engine::note_step().
void tell_of_step(const ParamGroups& groups);

} // namespace tessera::optim
