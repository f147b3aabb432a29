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

/// Configs stand in their variants in the order of the types.
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

namespace transfer {

const StateDictSettings& settings_of(engine::Unit& unit) {
  return std::any_cast<const StateDictSettings&>(unit.attachment());
}

void set_settings(engine::Unit& unit, const StateDictSettings& settings) {
  unit.attachment() = settings;
}

std::optional<StateDictSettings> settings_in(
    const torch::nn::Module& module,
    std::string_view call) {
  std::optional<StateDictSettings> first;
  for (const auto& unit : engine::units_in(module)) {
    const StateDictSettings& settings = settings_of(*unit);
    if (!first) {
      first = settings;
    } else if (!same(*first, settings)) {
      raise<c10::ValueError>(
          {.call = call, .unit = unit->name()},
          "its state_dict_type is not that of the model's other units. Set it on the whole model.");
    }
  }
  return first;
}

bool same(const StateDictSettings& a, const StateDictSettings& b) {
  const auto key = [](const StateDictSettings& settings) {
    bool rank0_only = false;
    const bool offload = std::visit(
        [](const auto& config) { return config.offload_to_cpu(); },
        settings.config);
    const bool optim_offload = std::visit(
        [](const auto& config) { return config.offload_to_cpu(); },
        settings.optim_config);
    if (const auto* full = std::get_if<FullStateDictConfig>(&settings.config)) {
      rank0_only = full->rank0_only();
    }
    bool optim_rank0_only = false;
    if (const auto* full =
            std::get_if<FullOptimStateDictConfig>(&settings.optim_config)) {
      optim_rank0_only = full->rank0_only();
    }
    return std::tuple(
        settings.type, offload, rank0_only, optim_offload, optim_rank0_only);
  };
  return key(a) == key(b);
}

} // namespace transfer

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
      before_(set_state_dict_type(
          module,
          type,
          std::move(config),
          std::move(optim_config))) {}

StateDictTypeGuard::~StateDictTypeGuard() {
  for (const auto& unit : engine::units_in(module_)) {
    transfer::set_settings(*unit, before_);
  }
}

} // namespace tessera
