// One state dict for several optimizers, merged and split.
#pragma once

#include <tessera/state/state_dict.h>

#include <string>
#include <string_view>
#include <vector>

#include "transfer/model_params.h"
#include "transfer/optim_names.h"

namespace tessera::transfer {

/// Adds `from`, the state dict of another optimizer, to `to`.
void merge_osd(StateDict& to, StateDict from);

/// Each optimizer's part of a dictionary, with one group for each group of the
/// optimizer; groups are recognized by their parameters. Throws one
/// c10::ValueError that names everything that does not fit. Without `strict`,
/// state that belongs to no optimizer's parameter is ignored, and a trainable
/// parameter may have none.
std::vector<StateDict> split_osd(
    std::string_view call,
    const StateDict& osd,
    const ModelParams& params,
    const OptimNames& optimizers,
    bool strict,
    std::vector<std::string> unexpected = {});

} // namespace tessera::transfer
