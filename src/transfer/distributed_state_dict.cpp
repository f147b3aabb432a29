#include <tessera/engine/parameters.h>
#include <tessera/error.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/optim/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/ops/zeros.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "comm/group/all_or_none.h"
#include "engine/module_units.h"
#include "optim/dictionary.h"
#include "transfer/model_params.h"
#include "transfer/optim_split.h"
#include "transfer/optim_transfer.h"
#include "transfer/write_model_state.h"

namespace tessera {
namespace {

using transfer::ModelParam;
using transfer::ModelParams;
using transfer::Names;

void check_options(const char* call, const StateDictOptions& options) {
  if (options.broadcast_from_rank0() && !options.full_state_dict()) {
    raise<c10::ValueError>(
        {.call = call},
        "broadcast_from_rank0 needs full_state_dict: rank 0 has full tensors. Set both.");
  }
}

/// Who must agree on what is set: where rank 0 sends, all that it sends to.
std::vector<Group> groups_for(
    const ModelParams& params,
    const StateDictOptions& options) {
  const Group root = params.root_group();
  return params.groups().empty() && options.broadcast_from_rank0() &&
          root.valid()
      ? std::vector<Group>{root}
      : params.groups();
}

at::Tensor to_cpu_if(const at::Tensor& tensor, bool offload) {
  return offload && tensor.defined() ? tensor.cpu() : tensor;
}

/// Values by parameter and buffer, from the units' shards.
class ModelReader {
 public:
  ModelReader(const ModelParams& params, const StateDictOptions& options)
      : options_(options) {
    const bool on_root_only =
        options.full_state_dict() && options.cpu_offload();
    const Group group = params.root_group();
    if (on_root_only && group.valid()) {
      root_ = group.global_ranks().front();
      is_root_ = group.rank() == 0;
    }
    for (const ModelParam& param : params.all()) {
      params_.emplace(param.face.unsafeGetTensorImpl(), &param);
    }
  }

  /// Values for these, in the same order; None on ranks that do not get them.
  /// Collective for full state.
  std::vector<StateValue> read(
      const std::vector<transfer::StateEntry>& entries) {
    if (options_.full_state_dict()) {
      gather(entries);
    }
    std::vector<StateValue> values;
    for (const transfer::StateEntry& entry : entries) {
      values.push_back(read(entry));
    }
    return values;
  }

  /// False where the dictionary stays empty.
  bool keeps() const {
    return is_root_;
  }
  bool wants(const transfer::StateEntry& entry) const {
    if (entry.is_buffer || !options_.ignore_frozen_params()) {
      return true;
    }
    return params_.at(entry.tensor.unsafeGetTensorImpl())->leaf.requires_grad();
  }

 private:
  const ModelParam* sharded_param_of(const transfer::StateEntry& entry) const {
    const auto found = params_.find(entry.tensor.unsafeGetTensorImpl());
    return found == params_.end() || !found->second->is_sharded()
        ? nullptr
        : found->second;
  }

  void gather(const std::vector<transfer::StateEntry>& entries) {
    std::vector<transfer::ParamPart> parts;
    std::unordered_set<const ModelParam*> seen; // tied ones once
    for (const transfer::StateEntry& entry : entries) {
      const ModelParam* param = sharded_param_of(entry);
      if (param != nullptr && seen.insert(param).second) {
        parts.push_back({param, param->own_part()});
      }
    }
    const auto wholes = transfer::gather(parts, root_, options_.cpu_offload());
    for (size_t i = 0; i < parts.size(); ++i) {
      wholes_.emplace(parts[i].param, wholes[i]);
    }
  }

  StateValue read(const transfer::StateEntry& entry) const {
    const ModelParam* param = sharded_param_of(entry);
    if (param == nullptr) {
      const at::Tensor tensor =
          to_cpu_if(entry.tensor.detach(), options_.cpu_offload());
      // Statistics that a rank takes of its own inputs are in buffers.
      return entry.is_buffer ? StateValue::of_any_rank(tensor)
                             : StateValue(tensor);
    }
    return options_.full_state_dict()
        ? StateValue(wholes_.at(param))
        : StateValue(param->sharded(
              to_cpu_if(param->own_part(), options_.cpu_offload())));
  }

  const StateDictOptions& options_;
  std::unordered_map<const c10::TensorImpl*, const ModelParam*> params_;
  std::unordered_map<const ModelParam*, at::Tensor> wholes_;
  std::optional<int> root_; // a rank of the world
  bool is_root_ = true;
};

/// Gives an optimizer state, unless some rank has some: which elements a rank
/// has, and so whether it has state, differs.
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

/// A dictionary on its way into optimizers.
class OptimizerLoad {
 public:
  /// Finds out what each of them gets. Throws on all ranks if that cannot be.
  OptimizerLoad(
      const char* call,
      torch::nn::Module& model,
      const OptimizerRefs& optimizers,
      const StateDict& dict,
      const StateDictOptions& options)
      : call_(call), optimizers_(optimizers) {
    check_options(call, options);
    const ModelParams params(model, call);
    groups_ = groups_for(params, options);
    const Group group = params.root_group();
    const bool from_rank0 = options.broadcast_from_rank0() && group.valid();
    std::vector<transfer::TensorGroups> tensors;
    std::vector<StateDict> parts(optimizers.size());
    comm::all_or_none(groups_, call, [&] {
      transfer::OptimNames names;
      for (const torch::optim::Optimizer& optimizer : optimizers) {
        tensors.push_back(transfer::tensors_of(optimizer));
        names.push_back(transfer::names_of(
            transfer::OptimTensors(params, tensors.back(), call)));
      }
      if (!from_rank0 || group.rank() == 0) {
        parts = split(dict, params, names, options);
      }
    });
    for (size_t i = 0; i < optimizers.size(); ++i) {
      to_load_.push_back(transfer::load_optim_state(
          model,
          {.call = call,
           .osd = parts[i],
           .tensors = tensors[i],
           .from = from_rank0 ? transfer::LoadFrom::Rank0
                              : transfer::LoadFrom::Shards,
           .keeps_names = dynamic_cast<const optim::NamedOptimizer*>(
                              &optimizers[i].get()) != nullptr,
           .group = from_rank0 ? std::optional(group) : std::nullopt,
           .keeps = [&optimizer =
                         optimizers[i].get()](const at::Tensor& param) {
             return optim::keeps_state_of(optimizer, param);
           }}));
    }
  }

  void apply() {
    before_ = transfer::load_together(groups_, call_, optimizers_, to_load_);
    to_load_.clear();
  }

  void undo() {
    transfer::load_back(before_);
  }

 private:
  std::vector<StateDict> split(
      const StateDict& dict,
      const ModelParams& params,
      const transfer::OptimNames& names,
      const StateDictOptions& options) const {
    if (dict.empty() && !optimizers_.empty()) {
      raise(
          {.call = call_},
          "the state dict is empty, but there are optimizers. Pass one, or with broadcast_from_rank0 on rank 0.");
    }
    if (!options.flatten_optimizer_state_dict()) {
      return transfer::split_osd(call_, dict, params, names, options.strict());
    }
    Names unexpected;
    const StateDict osd =
        transfer::unflatten_osd(call_, dict, names, unexpected);
    return transfer::split_osd(
        call_, osd, params, names, options.strict(), std::move(unexpected));
  }

  const char* call_;
  const OptimizerRefs& optimizers_;
  std::vector<Group> groups_;
  std::vector<StateDict> to_load_; // by optimizer
  transfer::Snapshots before_;
};

} // namespace

StateDict get_model_state_dict(
    ModuleRef model,
    const StateDictOptions& options,
    const ModuleRefs& submodules) {
  constexpr const char* kCall = "get_model_state_dict";
  check_options(kCall, options);
  const ModelParams params(model, kCall);
  const transfer::Selection selection(
      kCall, model, submodules, options.keep_submodule_prefixes());
  engine::reshard_units(model, kCall);
  ModelReader reader(params, options);
  std::vector<transfer::StateEntry> entries;
  Names names;
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
  check_options(kCall, options);
  const ModelParams params(model, kCall);
  const transfer::Selection selection(
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
      continue; // another rank has it
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
  check_options(kCall, options);
  const ModelParams params(model, kCall);
  const Group group = params.root_group();
  const bool is_needed =
      !options.broadcast_from_rank0() || !group.valid() || group.rank() == 0;
  comm::all_or_none(groups_for(params, options), kCall, [&] {
    if (is_needed && model_state_dict.empty() &&
        !transfer::state_entries(model).empty()) {
      raise(
          {.call = kCall},
          "the state dict is empty, but the model has state. Pass one, or with broadcast_from_rank0 on rank 0.");
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
  OptimizerLoad load(
      "set_optimizer_state_dict", model, optimizers, optim_state_dict, options);
  load.apply();
}

IncompatibleKeys set_state_dict(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    const ModelAndOptimizerState& state,
    const StateDictOptions& options) {
  OptimizerLoad load(
      "set_state_dict", model, optimizers, state.optimizer, options);
  load.apply();
  try { // writes nothing if it throws
    return set_model_state_dict(model, state.model, options);
  } catch (...) {
    load.undo();
    throw;
  }
}

} // namespace tessera
