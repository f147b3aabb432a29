// Several optimizers that load their state dicts, or none of them.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <functional>
#include <string_view>
#include <vector>

namespace tessera::transfer {

/// The earlier state of each optimizer: a function that puts it back.
using Snapshots = std::vector<std::function<void()>>;

/// Loads each optimizer's dictionary. If an optimizer refuses its dictionary on
/// any rank, all optimizers get their earlier state back. Returns the earlier
/// state. Collective.
Snapshots load_together(
    const std::vector<Group>& groups,
    std::string_view call,
    const OptimizerRefs& optimizers,
    const std::vector<StateDict>& dicts);

/// Puts the earlier state back.
void load_back(const Snapshots& before);

} // namespace tessera::transfer
