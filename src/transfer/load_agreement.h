// What ranks must have in common before optimizers load.
#pragma once

#include <tessera/state/state_dict.h>

#include <optional>
#include <string>
#include <vector>

#include "transfer/wanted_state.h"

namespace tessera::transfer {

/// One line for each leaf and parameter group, to compare with agree(): ranks
/// whose lines are equal can load together. State that a rank has for itself
/// alone is left out.
std::vector<std::string> lines_to_agree(
    const std::vector<WantedLeaf>& leaves,
    const std::optional<StateList>& param_groups);

} // namespace tessera::transfer
