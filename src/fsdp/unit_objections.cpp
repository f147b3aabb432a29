// Why units cannot be made.
#include <c10/core/ScalarType.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "deferred/replay.h"
#include "engine/module_units.h"
#include "engine/plain_params.h"
#include "engine/unit.h"
#include "fsdp/unit_plan.h"

namespace tessera::fsdp {
namespace {

using engine::NamedParam;
using engine::Unit;

/// Why a parameter cannot be sharded, if so.
std::optional<std::string> objection_to(
    const NamedParam& param,
    const NamedParam& first,
    const ShardRequest& request) {
  const at::Tensor& tensor = param.tensor;
  const auto because = [&](std::string_view what) {
    return fmt::format("parameter \"{}\": {}", param.name, what);
  };
  if (tensor.is_meta() && !is_deferred(tensor)) {
    return because(
        "still on the meta device. Give it memory and values first, or build the model under tessera::DeferredInit.");
  }
  if (!tensor.is_floating_point() && !tensor.is_complex()) {
    return because(fmt::format(
        "{} cannot have gradients. Register it as a buffer, or name it in ignored_params.",
        c10::toString(tensor.scalar_type())));
  }
  if (place_of(tensor) != place_of(first.tensor)) {
    return because(fmt::format(
        "on {}, while the unit's first parameter is on {}. Move the module to one device first.",
        place_of(tensor).str(),
        place_of(first.tensor).str()));
  }
  if (engine::is_averaged(tensor)) {
    return because(
        "a DistributedDataParallel averages its gradients. Use one of them: let the handle go before sharding.");
  }
  if (!tensor.is_leaf()) {
    return because(
        "computed by other operators, not a leaf. Register plain tensors as parameters.");
  }
  if (request.uniform && tensor.scalar_type() != first.tensor.scalar_type()) {
    return because(fmt::format(
        "{}, while the unit's first parameter is {}. Must flatten tensors with uniform dtype: give the modules units of their own, or use fully_shard, which takes both.",
        c10::toString(tensor.scalar_type()),
        c10::toString(first.tensor.scalar_type())));
  }
  if (request.uniform && request.unit.one_leaf &&
      tensor.requires_grad() != first.tensor.requires_grad()) {
    return because(
        "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`. Use use_orig_params(true), or give frozen modules units of their own.");
  }
  return std::nullopt;
}

/// Whether the unit belongs to a module around this one, as far as names tell.
bool is_around(const Unit& unit, const torch::nn::Module& module) {
  const auto home = unit.lock_home();
  return home == nullptr ||
      modules_in(*static_cast<const torch::nn::Module*>(home.get()))
          .contains(&module);
}

/// Whether units around the module have all of its parameters. (Parameters of
/// units beside the module are tied.)
std::optional<std::string> taken_from_outside(const torch::nn::Module& module) {
  const auto inside = modules_in(module);
  const auto params = engine::distinct_parameters(module);
  const bool is_all_taken = !params.empty() &&
      std::all_of(params.begin(), params.end(), [&](const NamedParam& param) {
        const Unit* unit = engine::unit_of(param.tensor);
        return unit != nullptr && !inside.contains(unit->home()) &&
            is_around(*unit, module);
      });
  if (!is_all_taken) {
    return std::nullopt;
  }
  return fmt::format(
      "its parameters are sharded already, as part of \"{}\". Shard inner modules first, then those that contain them.",
      engine::unit_of(params.front().tensor)->name());
}

} // namespace

std::optional<std::string> objection_to(
    const std::vector<UnitPlan>& plans,
    const torch::nn::Module& module,
    const ShardRequest& request) {
  for (const auto& unit : engine::units_in(module)) {
    if (unit->home() == &module) {
      return "this module is sharded already. Call it once for each module, inner ones first.";
    }
  }
  for (const UnitPlan& plan : plans) {
    for (const NamedParam& param : plan.params) {
      if (auto objection = objection_to(param, plan.params.front(), request)) {
        return objection;
      }
    }
  }
  return taken_from_outside(module);
}

} // namespace tessera::fsdp
