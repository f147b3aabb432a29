// Where units keep their state_dict_type.
#pragma once

#include <tessera/fsdp/state_dict_type.h>

#include <optional>
#include <string_view>

#include "shard/unit.h"

namespace tessera::fsdp {

const StateDictSettings& settings_of(shard::Unit& unit);
void set_settings(shard::Unit& unit, const StateDictSettings& settings);

/// That of all units in the module, or nothing if it has none. Throws
/// c10::ValueError if they differ.
std::optional<StateDictSettings> settings_in(
    const torch::nn::Module& module,
    std::string_view call);

bool same(const StateDictSettings& a, const StateDictSettings& b);

} // namespace tessera::fsdp
