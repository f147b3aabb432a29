// The param groups that a ZeroRedundancyOptimizer gets: what it refuses, and
// what its ranks must agree on.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/error.h>

#include <torch/optim/optimizer.h>

#include <optional>
#include <string>
#include <vector>

#include "zero/partition.h"

namespace tessera::zero {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

inline ErrorSite site(const Group& group, const char* call) {
  return {.call = call, .rank = group.rank(), .world_size = group.size()};
}

/// Throws what the constructor of ZeroRedundancyOptimizer throws for a group
/// that comes after `earlier_groups`.
void check_group(
    const torch::optim::OptimizerParamGroup& group,
    const ParamGroups& earlier_groups,
    const ErrorSite& where);

/// One line per group and parameter, for agree().
std::vector<std::string> describe(const ParamGroups& groups);

/// Before the first step. Each rank steps its own part and sends it, so ranks
/// with different values make one model of parts of several: as in Python that
/// is no error, but rank 0 warns. Collective.
void warn_of_unequal_values(const Group& group, const ParamGroups& groups);

/// Why the groups differ from those whose parameters have owners; empty if they
/// do not.
std::optional<std::string> objection_to_groups(
    const ParamGroups& groups,
    const Partition& partition,
    size_t num_local_groups);

} // namespace tessera::zero
