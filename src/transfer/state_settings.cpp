#include "transfer/state_settings.h"

#include <tessera/error.h>

#include <any>
#include <tuple>
#include <variant>

#include "engine/module_units.h"

namespace tessera::transfer {

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

} // namespace tessera::transfer
