#include <tessera/engine/parameters.h>
#include <tessera/error.h>
#include <tessera/optim/state_dict.h>
#include <tessera/transfer/optim_state.h>

#include <c10/util/Exception.h>

#include "transfer/load_optim_state.h"
#include "transfer/load_together.h"
#include "transfer/model_params.h"
#include "transfer/optim_dict_form.h"
#include "transfer/optim_state_keys.h"
#include "transfer/optim_tensors.h"
#include "transfer/save_optim_state.h"
#include "transfer/state_settings.h"

namespace tessera {
namespace {

using transfer::LoadFrom;
using transfer::NumbersAndNames;
using transfer::TensorGroups;

void warn_of_optim_input(const char* call) {
  TORCH_WARN_DEPRECATION(
      call,
      ": The `optim_input` argument is deprecated. Pass the optimizer, or leave it out.");
}

/// The tensors that numbers in the state dict refer to.
TensorGroups groups_from(
    const char* call,
    torch::nn::Module& model,
    const LoadOptimStateOptions& options) {
  if (options.optim_input()) {
    if (options.optim()) {
      raise<c10::ValueError>(
          {.call = call}, "Cannot set both `optim` and `optim_input`.");
    }
    warn_of_optim_input(call);
    return options.optim_input()->groups();
  }
  if (options.optim()) {
    return transfer::tensors_of(*options.optim());
  }
  return {parameters(model)};
}

StateDict to_cpu(const StateDict& osd) {
  StateDict result = osd;
  for (const auto& [key, entry] : osd.at("state").dict()) {
    StateDict& copy = result.at("state").dict().at(key).dict();
    for (const auto& [name, value] : entry.dict()) {
      if (value.is_tensor() && value.tensor().defined()) {
        copy.set(name, value.with_tensor(value.tensor().detach().cpu()));
      }
    }
  }
  return result;
}

StateDict local_to_load(
    const char* call,
    torch::nn::Module& model,
    const torch::optim::Optimizer& optim,
    const StateDict& osd,
    const OptimStateToLoadOptions& options) {
  const NumbersAndNames names = transfer::local_names(call, model, optim);
  return transfer::with_keys(osd, [&](const StateKey& key) {
    return names.change(key, /*to_ids=*/!options.is_named_optimizer());
  });
}

} // namespace

OptimInput::OptimInput(std::vector<at::Tensor> params)
    : groups_{std::move(params)} {}

OptimInput::OptimInput(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (const auto& group : groups) {
    groups_.push_back(group.params());
  }
}

StateDict full_optim_state_dict(
    ModuleRef model,
    const torch::optim::Optimizer& optim,
    const FullOptimStateOptions& options) {
  if (options.optim_input()) {
    warn_of_optim_input("full_optim_state_dict");
  }
  return transfer::save_optim_state(
      model,
      {.call = "full_optim_state_dict",
       .osd = optim::state_dict(optim),
       .tensors = options.optim_input() ? options.optim_input()->groups()
                                        : transfer::tensors_of(optim),
       .is_full = true,
       .rank0_only = options.rank0_only(),
       .offload_to_cpu = true,
       .group = options.group()});
}

StateDict sharded_optim_state_dict(
    ModuleRef model,
    const torch::optim::Optimizer& optim,
    const std::optional<Group>& group) {
  return transfer::save_optim_state(
      model,
      {.call = "sharded_optim_state_dict",
       .osd = optim::state_dict(optim),
       .tensors = transfer::tensors_of(optim),
       .is_full = false,
       .offload_to_cpu = false,
       .group = group});
}

StateDict shard_full_optim_state_dict(
    const StateDict& full_optim_state_dict,
    ModuleRef model,
    const LoadOptimStateOptions& options) {
  constexpr const char* kCall = "shard_full_optim_state_dict";
  return transfer::load_optim_state(
      model,
      {.call = kCall,
       .osd = full_optim_state_dict,
       .tensors = groups_from(kCall, model, options),
       .from = LoadFrom::Everywhere});
}

StateDict scatter_full_optim_state_dict(
    const std::optional<StateDict>& full_optim_state_dict,
    ModuleRef model,
    const LoadOptimStateOptions& options) {
  constexpr const char* kCall = "scatter_full_optim_state_dict";
  const StateDict none;
  return transfer::load_optim_state(
      model,
      {.call = kCall,
       .osd = full_optim_state_dict ? *full_optim_state_dict : none,
       .tensors = groups_from(kCall, model, options),
       .from = LoadFrom::Rank0,
       .group = options.group()});
}

StateDict flatten_sharded_optim_state_dict(
    const StateDict& sharded_optim_state_dict,
    ModuleRef model,
    const torch::optim::Optimizer& optim) {
  return transfer::load_optim_state(
      model,
      {.call = "flatten_sharded_optim_state_dict",
       .osd = sharded_optim_state_dict,
       .tensors = transfer::tensors_of(optim),
       .from = LoadFrom::Shards});
}

StateDict rekey_optim_state_dict(
    const StateDict& optim_state_dict,
    OptimStateKeyType key_type,
    ModuleRef model,
    const LoadOptimStateOptions& options) {
  constexpr const char* kCall = "rekey_optim_state_dict";
  transfer::check_form(optim_state_dict, kCall);
  const TensorGroups groups = groups_from(kCall, model, options);
  const bool to_ids = key_type == OptimStateKeyType::ParamId;
  const StateDict& state = optim_state_dict.at("state").dict();
  size_t num_ids = 0;
  for (const auto& [key, entry] : state) {
    num_ids += key.is_id() ? 1 : 0;
  }
  if (num_ids != 0 && num_ids != state.size()) {
    raise<c10::ValueError>(
        {.call = kCall},
        "Invalid parameter keys: numbers and names are mixed. Use one of them.");
  }
  if (!state.empty() && (num_ids != 0) == to_ids) {
    return optim_state_dict;
  }
  const transfer::ModelParams params(model, kCall);
  const transfer::OptimTensors tensors(params, groups, kCall);
  NumbersAndNames names(kCall);
  for (const auto& group : tensors.groups()) {
    for (const transfer::OptimTensor& one : group) {
      names.add(one.id, one.members.front()->name);
    }
  }
  return transfer::with_keys(optim_state_dict, [&](const StateKey& key) {
    return names.change(key, to_ids);
  });
}

StateDict optim_state_dict(
    ModuleRef model,
    const torch::optim::Optimizer& optim,
    const OptimStateOptions& options) {
  constexpr const char* kCall = "optim_state_dict";
  const StateDictSettings settings =
      transfer::settings_in(model, kCall).value_or(StateDictSettings());
  const StateDict osd = options.optim_state_dict() ? *options.optim_state_dict()
                                                   : optim::state_dict(optim);
  if (settings.type == StateDictType::LocalStateDict) {
    const NumbersAndNames names = transfer::local_names(kCall, model, optim);
    const StateDict local = transfer::with_keys(osd, [&](const StateKey& key) {
      return names.change(key, /*to_ids=*/false);
    });
    return std::get<LocalOptimStateDictConfig>(settings.optim_config)
               .offload_to_cpu()
        ? to_cpu(local)
        : local;
  }
  const auto* full =
      std::get_if<FullOptimStateDictConfig>(&settings.optim_config);
  const bool offload = std::visit(
      [](const auto& config) { return config.offload_to_cpu(); },
      settings.optim_config);
  return transfer::save_optim_state(
      model,
      {.call = kCall,
       .osd = osd,
       .tensors = transfer::tensors_of(optim),
       .is_full = full != nullptr,
       .rank0_only = full != nullptr && full->rank0_only(),
       .offload_to_cpu = offload,
       .group = options.group()});
}

StateDict optim_state_dict_to_load(
    ModuleRef model,
    torch::optim::Optimizer& optim,
    const StateDict& optim_state_dict,
    const OptimStateToLoadOptions& options) {
  constexpr const char* kCall = "optim_state_dict_to_load";
  const StateDictSettings settings =
      transfer::settings_in(model, kCall).value_or(StateDictSettings());
  const auto* full =
      std::get_if<FullOptimStateDictConfig>(&settings.optim_config);
  const LoadFrom from = full == nullptr ? LoadFrom::Shards
      : full->rank0_only()              ? LoadFrom::Rank0
                                        : LoadFrom::EverywhereTogether;
  StateDict result = settings.type == StateDictType::LocalStateDict
      ? local_to_load(kCall, model, optim, optim_state_dict, options)
      : transfer::load_optim_state(
            model,
            {.call = kCall,
             .osd = optim_state_dict,
             .tensors = transfer::tensors_of(optim),
             .from = from,
             .keeps_names = options.is_named_optimizer(),
             .group = options.group()});
  if (options.load_directly()) {
    transfer::load_together(
        transfer::ModelParams(model, kCall).groups(), kCall, {optim}, {result});
  }
  return result;
}

} // namespace tessera
