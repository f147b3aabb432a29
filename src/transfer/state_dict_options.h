// What StateDictOptions ask for, checked and applied to a model.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <vector>

#include "transfer/model_params.h"

namespace tessera::transfer {

/// Throws c10::ValueError for options that contradict each other.
void check_options(const char* call, const StateDictOptions& options);

/// The groups whose ranks must agree on what is set; if rank 0 broadcasts, the
/// group it broadcasts to.
std::vector<Group> groups_for(
    const ModelParams& params,
    const StateDictOptions& options);

} // namespace tessera::transfer
