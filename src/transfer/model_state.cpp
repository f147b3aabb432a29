#include <tessera/engine/parameters.h>
#include <tessera/error.h>
#include <tessera/transfer/model_state.h>

#include <unordered_map>

#include "engine/list_parameters.h"
#include "engine/module_units.h"
#include "engine/unit.h"
#include "state/part_of.h"
#include "transfer/model_params.h"
#include "transfer/param_parts.h"
#include "transfer/state_entries.h"
#include "transfer/state_settings.h"
#include "transfer/write_model_state.h"

namespace tessera {
namespace {

using engine::Unit;

/// A tensor that no unit has. Buffers may differ between ranks, since they hold
/// statistics of each rank's inputs.
StateValue plain_value(at::Tensor tensor, bool is_buffer) {
  return is_buffer ? StateValue::of_any_rank(std::move(tensor))
                   : StateValue(std::move(tensor));
}

/// The tensors that optimizers step, under the names of
/// tessera::named_parameters.
StateDict local_state(torch::nn::Module& module, bool offload_to_cpu) {
  const auto shown = [&](const at::Tensor& tensor) {
    return offload_to_cpu ? tensor.detach().cpu() : tensor.detach();
  };
  StateDict result;
  for (const auto& [name, tensor] : engine::list_parameters(module)) {
    const auto origin = state::find_part_of(tensor, name);
    result.set(
        name,
        origin ? StateValue::part(shown(tensor), *origin)
               : StateValue(shown(tensor)));
  }
  for (const transfer::StateEntry& entry : transfer::state_entries(module)) {
    if (entry.is_buffer) {
      result.set(entry.name, StateValue::of_any_rank(shown(entry.tensor)));
    }
  }
  return result;
}

ShardedTensor to_cpu(const ShardedTensor& tensor) {
  std::vector<ShardedTensor::Piece> pieces;
  for (const auto& piece : tensor.pieces()) {
    pieces.push_back({piece.box, piece.tensor.detach().cpu()});
  }
  return {tensor.sizes(), tensor.dtype(), std::move(pieces), tensor.group()};
}

StateDict sharded_state(torch::nn::Module& module, bool offload_to_cpu) {
  StateDict result;
  for (const transfer::StateEntry& entry : transfer::state_entries(module)) {
    if (const Unit* unit = engine::unit_of(entry.tensor)) {
      const ShardedTensor tensor =
          unit->params().sharded(entry.tensor.unsafeGetTensorImpl());
      result.set(entry.name, offload_to_cpu ? to_cpu(tensor) : tensor);
    } else {
      const at::Tensor tensor = entry.tensor.detach();
      result.set(
          entry.name,
          plain_value(offload_to_cpu ? tensor.cpu() : tensor, entry.is_buffer));
    }
  }
  return result;
}

StateDict full_state(
    torch::nn::Module& module,
    const transfer::ModelParams& params,
    const FullStateDictConfig& config) {
  std::optional<int> root;
  bool is_root = true;
  if (config.rank0_only() && !params.groups().empty()) {
    root = params.groups().front().global_ranks().front();
    is_root = params.groups().front().rank() == 0;
  }
  std::vector<transfer::ParamPart> parts;
  for (const transfer::ModelParam& param : params.all()) {
    if (param.is_sharded()) {
      parts.push_back({&param, param.own_part()});
    }
  }
  const auto wholes = transfer::gather(parts, root, config.offload_to_cpu());
  std::unordered_map<const c10::TensorImpl*, at::Tensor> gathered;
  for (size_t i = 0; i < parts.size(); ++i) {
    gathered[parts[i].param->face.unsafeGetTensorImpl()] = wholes[i];
  }
  StateDict result;
  if (!is_root) {
    return result;
  }
  for (const transfer::StateEntry& entry : transfer::state_entries(module)) {
    const auto whole = gathered.find(entry.tensor.unsafeGetTensorImpl());
    if (whole != gathered.end()) {
      result.set(entry.name, whole->second);
    } else {
      const at::Tensor tensor = entry.tensor.detach();
      const bool moves = config.offload_to_cpu() && !tensor.is_cpu();
      const at::Tensor shown = moves ? tensor.cpu()
          : gathered.empty()         ? tensor // of a plain module
                                     : tensor.clone();
      result.set(entry.name, plain_value(shown, entry.is_buffer));
    }
  }
  return result;
}

} // namespace

StateDict state_dict(ModuleRef module) {
  const transfer::ModelParams params(module, "state_dict");
  engine::reshard_units(module, "state_dict");
  const StateDictSettings settings =
      transfer::settings_in(module, "state_dict").value_or(StateDictSettings());
  if (const auto* full = std::get_if<FullStateDictConfig>(&settings.config)) {
    return full_state(module, params, *full);
  }
  if (const auto* local = std::get_if<LocalStateDictConfig>(&settings.config)) {
    return local_state(module, local->offload_to_cpu());
  }
  return sharded_state(
      module,
      std::get<ShardedStateDictConfig>(settings.config).offload_to_cpu());
}

IncompatibleKeys load_state_dict(
    ModuleRef module,
    const StateDict& dict,
    bool strict) {
  const auto settings = transfer::settings_in(module, "load_state_dict");
  return transfer::write_model_state(
      module,
      {.call = "load_state_dict",
       .dict = dict,
       .strict = strict,
       .is_local =
           settings && settings->type == StateDictType::LocalStateDict});
}

} // namespace tessera
