#include <tessera/error.h>
#include <tessera/transfer/state_dict_type.h>

#include "engine/module_units.h"
#include "transfer/state_settings.h"

namespace tessera {
namespace {

const char* name_of(StateDictType type) {
  switch (type) {
    case StateDictType::FullStateDict:
      return "FullStateDict";
    case StateDictType::LocalStateDict:
      return "LocalStateDict";
    case StateDictType::ShardedStateDict:
      return "ShardedStateDict";
  }
  return "?";
}

/// The alternatives of the variants are in the order of the types.
template <class Config>
void check_config(StateDictType type, const Config& config, const char* what) {
  if (config.index() != static_cast<size_t>(type)) {
    raise<c10::ValueError>(
        {.call = "set_state_dict_type"},
        std::string("the ") + what + " is not one of " + name_of(type) +
            ". Pass the config of that name, or none.");
  }
}

} // namespace

StateDictSettings StateDictSettings::of(StateDictType type) {
  switch (type) {
    case StateDictType::LocalStateDict:
      return {type, LocalStateDictConfig(), LocalOptimStateDictConfig()};
    case StateDictType::ShardedStateDict:
      return {type, ShardedStateDictConfig(), ShardedOptimStateDictConfig()};
    case StateDictType::FullStateDict:
      break;
  }
  return {type, FullStateDictConfig(), FullOptimStateDictConfig()};
}

StateDictSettings set_state_dict_type(
    ModuleRef module,
    StateDictType type,
    std::optional<StateDictConfig> config,
    std::optional<OptimStateDictConfig> optim_config) {
  StateDictSettings settings = StateDictSettings::of(type);
  if (config) {
    settings.config = *config;
  }
  if (optim_config) {
    settings.optim_config = *optim_config;
  }
  return set_state_dict_type(module, settings);
}

StateDictSettings set_state_dict_type(
    ModuleRef module,
    const StateDictSettings& settings) {
  check_config(settings.type, settings.config, "config");
  check_config(settings.type, settings.optim_config, "optim_config");
  const StateDictSettings before = get_state_dict_type(module);
  for (const auto& unit : engine::units_in(module)) {
    transfer::set_settings(*unit, settings);
  }
  return before;
}

StateDictSettings get_state_dict_type(ModuleRef module) {
  if (auto settings = transfer::settings_in(module, "get_state_dict_type")) {
    return *settings;
  }
  raise<c10::ValueError>(
      {.call = "get_state_dict_type"},
      "the module has no FSDP units. Shard it first.");
}

StateDictTypeGuard::StateDictTypeGuard(
    ModuleRef module,
    StateDictType type,
    std::optional<StateDictConfig> config,
    std::optional<OptimStateDictConfig> optim_config)
    : module_(module),
      before_(set_state_dict_type(module, type, config, optim_config)) {}

StateDictTypeGuard::~StateDictTypeGuard() {
  for (const auto& unit : engine::units_in(module_)) {
    transfer::set_settings(*unit, before_);
  }
}

} // namespace tessera
