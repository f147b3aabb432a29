// What the engine learns of optimizers.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::optim {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

/// The optimizer of these groups makes a step; see engine::note_step().
void tell_of_step(const ParamGroups& groups);

/// The optimizer `name` has these groups, and `part` lives as long as it. If
/// some of their parameters are shards and others are not sharded, the ranks
/// compare the latter; see [Note: plain parameters] in engine/plain_watch.h.
void watch_plain_params(
    const ParamGroups& groups,
    const std::string& name,
    const std::shared_ptr<const void>& part);

} // namespace tessera::optim
