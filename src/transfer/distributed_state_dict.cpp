#include <tessera/error.h>
#include <tessera/optim/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/ops/zeros.h>

#include "comm/group/all_or_none.h"
#include "engine/module_units.h"
#include "optim/dictionary.h"
#include "transfer/flat_optim_dict.h"
#include "transfer/model_params.h"
#include "transfer/model_reader.h"
#include "transfer/optim_tensors.h"
#include "transfer/optimizer_load.h"
#include "transfer/save_optim_state.h"
#include "transfer/split_optim_state.h"
#include "transfer/state_dict_options.h"
#include "transfer/state_entries.h"
#include "transfer/submodule_selection.h"
#include "transfer/write_model_state.h"

namespace tessera {
namespace {

using transfer::ModelParams;

/// Gives an optimizer state, unless some rank's optimizer has state already. A
/// rank without elements has none, so ranks decide this together.
void initialize_together(
    const std::vector<Group>& groups,
    const char* call,
    torch::optim::Optimizer& optimizer) {
  const at::Tensor has_state = at::zeros({1}, at::kInt);
  if (optim::has_state(optimizer)) {
    has_state.fill_(1);
  }
  for (const Group& group : groups) {
    group.all_reduce(has_state, ReduceOp::Max, "has optimizer state");
  }
  comm::all_or_none(groups, call, [&] {
    if (has_state.item<int32_t>() == 0) {
      optim::initialize_state(optimizer);
    }
  });
}

} // namespace

StateDict get_model_state_dict(
    ModuleRef model,
    const StateDictOptions& options,
    const ModuleRefs& submodules) {
  constexpr const char* kCall = "get_model_state_dict";
  transfer::check_options(kCall, options);
  const ModelParams params(model, kCall);
  const transfer::SubmoduleSelection selection(
      kCall, model, submodules, options.keep_submodule_prefixes());
  engine::reshard_units(model, kCall);
  transfer::ModelReader reader(params, options);
  std::vector<transfer::StateEntry> entries;
  std::vector<std::string> names;
  for (const transfer::StateEntry& entry : transfer::state_entries(model)) {
    const auto name = selection.rename(entry.name);
    if (name && reader.wants(entry)) {
      entries.push_back(entry);
      names.push_back(*name);
    }
  }
  const auto values = reader.read(entries);
  StateDict result;
  if (reader.keeps()) {
    for (size_t i = 0; i < names.size(); ++i) {
      transfer::set_once(kCall, result, names[i], values[i]);
    }
  }
  return result;
}

StateDict get_optimizer_state_dict(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    const StateDictOptions& options,
    const ModuleRefs& submodules) {
  constexpr const char* kCall = "get_optimizer_state_dict";
  transfer::check_options(kCall, options);
  const ModelParams params(model, kCall);
  const transfer::SubmoduleSelection selection(
      kCall, model, submodules, options.keep_submodule_prefixes());
  for (torch::optim::Optimizer& optimizer : optimizers) {
    initialize_together(params.groups(), kCall, optimizer);
  }
  const Group group = params.root_group();
  StateDict result;
  const bool rank0_only = options.full_state_dict() && options.cpu_offload();
  const optim::Collect to = !options.full_state_dict() ? optim::Collect::Nobody
      : rank0_only                                     ? optim::Collect::Rank0
                   : optim::Collect::Everybody;
  for (torch::optim::Optimizer& optimizer : optimizers) {
    const StateDict osd = optim::collect_state_dict(optimizer, to);
    if (osd.empty()) {
      continue; // another rank has the state dict
    }
    transfer::merge_osd(
        result,
        transfer::save_optim_state(
            model,
            {.call = kCall,
             .osd = osd,
             .tensors = transfer::tensors_of(optimizer),
             .is_full = options.full_state_dict(),
             .rank0_only = rank0_only,
             .offload_to_cpu = options.cpu_offload(),
             .group = group.valid() ? std::optional(group) : std::nullopt}));
  }
  result = transfer::select_osd(kCall, result, selection);
  return options.flatten_optimizer_state_dict() ? transfer::flatten_osd(result)
                                                : result;
}

ModelAndOptimizerState get_state_dict(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    const StateDictOptions& options,
    const ModuleRefs& submodules) {
  return {
      get_model_state_dict(model, options, submodules),
      get_optimizer_state_dict(model, optimizers, options, submodules)};
}

IncompatibleKeys set_model_state_dict(
    ModuleRef model,
    const StateDict& model_state_dict,
    const StateDictOptions& options) {
  constexpr const char* kCall = "set_model_state_dict";
  transfer::check_options(kCall, options);
  const ModelParams params(model, kCall);
  const Group group = params.root_group();
  const bool is_needed =
      !options.broadcast_from_rank0() || !group.valid() || group.rank() == 0;
  comm::all_or_none(transfer::groups_for(params, options), kCall, [&] {
    if (is_needed && model_state_dict.empty() &&
        !transfer::state_entries(model).empty()) {
      raise(
          {.call = kCall},
          "the state dict is empty, but the model has state. Pass a state dict; with broadcast_from_rank0, on rank 0.");
    }
  });
  return transfer::write_model_state(
      model,
      {.call = kCall,
       .dict = model_state_dict,
       .strict = options.strict(),
       .from_rank0 = options.broadcast_from_rank0(),
       .ignore_frozen = options.ignore_frozen_params()});
}

void set_optimizer_state_dict(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    const StateDict& optim_state_dict,
    const StateDictOptions& options) {
  transfer::OptimizerLoad load(
      "set_optimizer_state_dict", model, optimizers, optim_state_dict, options);
  load.apply();
}

IncompatibleKeys set_state_dict(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    const ModelAndOptimizerState& state,
    const StateDictOptions& options) {
  transfer::OptimizerLoad load(
      "set_state_dict", model, optimizers, state.optimizer, options);
  load.apply();
  try { // a failed set_model_state_dict() writes nothing
    return set_model_state_dict(model, state.model, options);
  } catch (...) {
    load.undo();
    throw;
  }
}

} // namespace tessera
