// The state_dict_type of a unit.
#pragma once

#include <tessera/transfer/state_dict_type.h>

#include <optional>
#include <string_view>

#include "engine/unit.h"

namespace tessera::transfer {

const StateDictSettings& settings_of(engine::Unit& unit);
void set_settings(engine::Unit& unit, const StateDictSettings& settings);

/// The settings of all units in the module, or nothing if it has no units.
/// Throws c10::ValueError if units differ.
std::optional<StateDictSettings> settings_in(
    const torch::nn::Module& module,
    std::string_view call);

bool same(const StateDictSettings& a, const StateDictSettings& b);

} // namespace tessera::transfer
