#include "train/captured/step_objections.h"

#include <tessera/comm/init.h>
#include <tessera/optim/capturable.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>

#include "engine/owners.h"
#include "engine/schedule.h"

namespace tessera::train {
namespace {

/// Shards of another model: a replay would count no write to them, and what
/// was gathered of them would stay as it is.
std::string objection_to_strange_shards(const StepParts& parts) {
  for (const at::Tensor& leaf : parts.leaves) {
    const engine::Unit* unit = leaf.has_storage()
        ? engine::find_owner(engine::storage_of(leaf)).unit
        : nullptr;
    const bool is_of_model =
        std::any_of(parts.units.begin(), parts.units.end(), [&](auto& known) {
          return known.get() == unit;
        });
    if (unit != nullptr && !is_of_model) {
      return fmt::format(
          "an optimizer steps shards of unit \"{}\", which is not in the model of this object. Pass a module that holds both.",
          unit->name());
    }
  }
  return "";
}

std::string objection_to_units(const StepParts& parts) {
  for (const auto& unit : parts.units) {
    if (unit->options().offload) {
      return "shards in host memory are copied by the host. Leave out the offload policy.";
    }
    if (&unit->schedule() != &parts.units.front()->schedule()) {
      return "the model is sharded over several groups of ranks. Shard all of it over one.";
    }
  }
  return objection_to_strange_shards(parts);
}

} // namespace

std::string objection_to(const StepParts& parts, const StepRanks& ranks) {
  for (const auto& optimizer : parts.optimizers) {
    if (const auto found = optim::capture_objection(optimizer)) {
      return *found;
    }
  }
  if (parts.groups().size() > 1) {
    return "the step trains over several groups of ranks. Use one group for model and optimizers.";
  }
  const bool may_have_others =
      !ranks.are_several() && is_initialized() && world().size() > 1;
  if (may_have_others && parts.units.empty()) {
    return "this process has other ranks, and CapturedStep cannot know whether they take part in the step. Use fully_shard or DistributedDataParallel.";
  }
  return objection_to_units(parts);
}

std::string present_objection_to(const StepParts& parts) {
  const bool holds_gradients =
      std::any_of(parts.units.begin(), parts.units.end(), [](const auto& unit) {
        return unit->schedule().holds_gradients();
      });
  return holds_gradients
      ? "gradients of earlier backwards without synchronisation are still waiting. Make all micro-batches of a step in one call."
      : "";
}

} // namespace tessera::train
