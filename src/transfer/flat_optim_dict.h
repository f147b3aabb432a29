// An optimizer's state dict on one level.
#pragma once

#include <tessera/state/state_dict.h>

#include <string>
#include <string_view>
#include <vector>

#include "transfer/optim_names.h"

namespace tessera::transfer {

/// Keys such as "state.fc.weight.exp_avg" and "param_groups.fc.weight.lr".
/// Values of a group are written once for each of its parameters, as in Python:
/// the result says nothing about groups, so it fits optimizers with others.
StateDict flatten_osd(const StateDict& osd);
/// The inverse, with one group for each group of the optimizers. Keys that
/// belong to no parameter go to `unexpected`. Throws c10::ValueError if
/// parameters of one group have different values.
StateDict unflatten_osd(
    std::string_view call,
    const StateDict& flat,
    const OptimNames& optimizers,
    std::vector<std::string>& unexpected);

} // namespace tessera::transfer
