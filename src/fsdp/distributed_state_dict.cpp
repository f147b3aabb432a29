#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/fsdp/distributed_state_dict.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/state_dict.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "comm/together.h"
#include "fsdp/model_params.h"
#include "fsdp/optim_transfer.h"
#include "fsdp/write_model_state.h"
#include "shard/boxes.h"
#include "shard/names.h"
#include "state/nearest.h"

namespace tessera {
namespace {

using fsdp::ModelParam;
using fsdp::ModelParams;
using Names = std::vector<std::string>;

void check_options(const char* call, const StateDictOptions& options) {
  if (options.broadcast_from_rank0() && !options.full_state_dict()) {
    raise<c10::ValueError>(
        {.call = call},
        "broadcast_from_rank0 needs full_state_dict: rank 0 has full tensors. Set both.");
  }
}

/// Whose rank 0 has the state that only one rank has; none: every rank.
Group group_for(const ModelParams& params) {
  if (!params.groups().empty()) {
    return params.groups().front();
  }
  return is_initialized() ? world() : Group();
}

/// Names below some submodules, and without their prefixes if asked for.
class Selection {
 public:
  Selection(
      const char* call,
      torch::nn::Module& model,
      const Submodules& submodules,
      bool keep_prefixes)
      : keep_prefixes_(keep_prefixes), takes_all_(submodules.empty()) {
    for (torch::nn::Module& submodule : submodules) {
      std::optional<std::string> found;
      for (const auto& item : model.named_modules()) {
        if (item.value().get() == &submodule) {
          found = shard::clean_name(item.key());
        }
      }
      if (&submodule == &model) {
        found = "";
      }
      if (!found) {
        raise<c10::ValueError>(
            {.call = call},
            fmt::format(
                "a submodule of the class {} is not in the model.",
                submodule.name()));
      }
      prefixes_.push_back(found->empty() ? "" : *found + ".");
    }
  }

  /// The name to use, or nothing if it is not wanted.
  std::optional<std::string> rename(const std::string& name) const {
    if (takes_all_) {
      return name;
    }
    for (const std::string& prefix : prefixes_) {
      if (name.starts_with(prefix)) {
        return keep_prefixes_ ? name : name.substr(prefix.size());
      }
    }
    return std::nullopt;
  }

 private:
  bool keep_prefixes_;
  bool takes_all_;
  Names prefixes_;
};

at::Tensor to_cpu_if(const at::Tensor& tensor, bool offload) {
  return offload && tensor.defined() ? tensor.cpu() : tensor;
}

/// This rank's range of a parameter as pieces of the unit's shard. Writes to
/// them are noticed.
ShardedTensor sharded_param(const ModelParam& param, bool offload) {
  const at::Tensor part = param.own_part();
  const shard::Run run = param.run();
  std::vector<ShardedTensor::Piece> pieces;
  int64_t begin = 0;
  for (Box& box : shard::boxes_of(param.shape(), run.param_begin, run.numel)) {
    const int64_t numel = box.numel();
    const at::Tensor piece =
        part.narrow(0, begin, numel).view(box.sizes).detach();
    pieces.push_back({std::move(box), to_cpu_if(piece, offload)});
    begin += numel;
  }
  return {
      param.shape(),
      part.scalar_type(),
      std::move(pieces),
      param.unit->groups().shard};
}

/// Values by parameter and buffer, from the units' shards.
class ModelReader {
 public:
  ModelReader(const ModelParams& params, const StateDictOptions& options)
      : options_(options) {
    const bool on_root_only =
        options.full_state_dict() && options.cpu_offload();
    const Group group = group_for(params);
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
  std::vector<StateValue> read(const std::vector<fsdp::StateEntry>& entries) {
    if (options_.full_state_dict()) {
      gather(entries);
    }
    std::vector<StateValue> values;
    for (const fsdp::StateEntry& entry : entries) {
      values.push_back(read(entry));
    }
    return values;
  }

  /// False where the dictionary stays empty.
  bool keeps() const {
    return is_root_;
  }
  bool wants(const fsdp::StateEntry& entry) const {
    if (entry.is_buffer || !options_.ignore_frozen_params()) {
      return true;
    }
    return params_.at(entry.tensor.unsafeGetTensorImpl())->leaf.requires_grad();
  }

 private:
  const ModelParam* sharded_param_of(const fsdp::StateEntry& entry) const {
    const auto found = params_.find(entry.tensor.unsafeGetTensorImpl());
    return found == params_.end() || !found->second->is_sharded()
        ? nullptr
        : found->second;
  }

  void gather(const std::vector<fsdp::StateEntry>& entries) {
    std::vector<fsdp::ParamPart> parts;
    std::unordered_set<const ModelParam*> seen; // tied ones once
    for (const fsdp::StateEntry& entry : entries) {
      const ModelParam* param = sharded_param_of(entry);
      if (param != nullptr && seen.insert(param).second) {
        parts.push_back({param, param->own_part()});
      }
    }
    const auto wholes = fsdp::gather(parts, root_, options_.cpu_offload());
    for (size_t i = 0; i < parts.size(); ++i) {
      wholes_.emplace(parts[i].param, wholes[i]);
    }
  }

  StateValue read(const fsdp::StateEntry& entry) const {
    const ModelParam* param = sharded_param_of(entry);
    if (param == nullptr) {
      return to_cpu_if(entry.tensor.detach(), options_.cpu_offload());
    }
    return options_.full_state_dict()
        ? StateValue(wholes_.at(param))
        : StateValue(sharded_param(*param, options_.cpu_offload()));
  }

  const StateDictOptions& options_;
  std::unordered_map<const c10::TensorImpl*, const ModelParam*> params_;
  std::unordered_map<const ModelParam*, at::Tensor> wholes_;
  std::optional<int> root_; // a rank of the world
  bool is_root_ = true;
};

// ---- Optimizers: one dictionary for several

/// Adds `from`, of another optimizer, to `to`.
void merge(StateDict& to, StateDict from) {
  if (from.empty()) {
    return; // on other ranks than 0
  }
  if (to.empty()) {
    to = std::move(from);
    return;
  }
  for (const auto& [key, entry] : from.at("state").dict()) {
    to.at("state").dict().set(key, entry);
  }
  for (const StateValue& group : from.at("param_groups").list()) {
    to.at("param_groups").list().push_back(group);
  }
}

StateDict select(const StateDict& osd, const Selection& selection) {
  if (osd.empty()) {
    return osd;
  }
  StateDict state;
  for (const auto& [key, entry] : osd.at("state").dict()) {
    if (const auto name = selection.rename(key.name())) {
      state.set(*name, entry);
    }
  }
  StateList groups;
  for (const StateValue& group : osd.at("param_groups").list()) {
    StateDict copy = group.dict();
    StateList names;
    for (const StateValue& param : group.dict().at("params").list()) {
      if (const auto name = selection.rename(param.string())) {
        names.emplace_back(*name);
      }
    }
    if (!names.empty()) {
      copy.set("params", std::move(names));
      groups.emplace_back(std::move(copy));
    }
  }
  return {{"state", std::move(state)}, {"param_groups", std::move(groups)}};
}

/// Values of the same group are written once for each of its parameters, as
/// Python has it: then a dictionary says nothing of groups, and fits others.
StateDict flatten_osd(const StateDict& osd) {
  StateDict flat;
  if (osd.empty()) {
    return flat;
  }
  for (const auto& [key, entry] : osd.at("state").dict()) {
    for (const auto& [name, value] : entry.dict()) {
      flat.set("state." + key.name() + "." + name.name(), value);
    }
  }
  for (const StateValue& group : osd.at("param_groups").list()) {
    for (const StateValue& param : group.dict().at("params").list()) {
      for (const auto& [key, value] : group.dict()) {
        if (key != StateKey("params")) {
          flat.set("param_groups." + param.string() + "." + key.name(), value);
        }
      }
    }
  }
  return flat;
}

/// One group for each of the optimizers'.
StateDict unflatten_osd(
    const char* call,
    const StateDict& flat,
    const std::vector<std::vector<Names>>& groups_by_optimizer) {
  StateDict state;
  StateList groups;
  std::unordered_set<std::string> used;
  const auto take_below = [&](const std::string& prefix, StateDict& into) {
    for (const auto& [key, value] : flat) {
      const std::string text = key.text();
      if (text.starts_with(prefix) &&
          text.find('.', prefix.size()) == std::string::npos) {
        into.set(text.substr(prefix.size()), value);
        used.insert(text);
      }
    }
  };
  for (const auto& optimizer_groups : groups_by_optimizer) {
    for (const Names& names : optimizer_groups) {
      std::optional<StateDict> group;
      StateList params;
      for (const std::string& name : names) {
        StateDict entry;
        take_below("state." + name + ".", entry);
        if (!entry.empty()) {
          state.set(name, std::move(entry));
        }
        StateDict values;
        take_below("param_groups." + name + ".", values);
        if (group && values != *group) {
          raise<c10::ValueError>(
              {.call = call, .parameter = name},
              fmt::format(
                  "its param_groups values differ from those of \"{}\", which is in the same group of the optimizer:\n{}",
                  params.front().string(),
                  diff(*group, values)));
        }
        group = std::move(values);
        params.emplace_back(name);
      }
      StateDict complete = group.value_or(StateDict());
      complete.set("params", std::move(params));
      groups.emplace_back(std::move(complete));
    }
  }
  std::string text;
  for (const auto& [key, value] : flat) {
    if (!used.contains(key.text())) {
      text += "\n  unexpected \"" + key.text() + "\".";
    }
  }
  if (!text.empty()) {
    raise<c10::ValueError>(
        {.call = call}, "the state dict does not fit the optimizers." + text);
  }
  return {{"state", std::move(state)}, {"param_groups", std::move(groups)}};
}

/// Names in each group of an optimizer.
std::vector<Names> names_of(const fsdp::OptimTensors& tensors) {
  std::vector<Names> result;
  for (const auto& group : tensors.groups()) {
    result.emplace_back();
    for (const fsdp::OptimTensor& one : group) {
      for (const ModelParam* member : one.members) {
        result.back().push_back(member->name);
      }
    }
  }
  return result;
}

/// Which part of a dictionary is each optimizer's. Groups are recognized by
/// their parameters.
class Split {
 public:
  Split(
      const char* call,
      const StateDict& osd,
      const ModelParams& params,
      const std::vector<std::vector<Names>>& groups_by_optimizer,
      bool strict)
      : call_(call) {
    check_form(osd, params, strict);
    const StateList& groups = osd.at("param_groups").list();
    std::unordered_map<std::string, size_t> group_of;
    for (size_t g = 0; g < groups.size(); ++g) {
      for (const StateValue& param : groups[g].dict().at("params").list()) {
        if (!group_of.emplace(param.string(), g).second) {
          refuse(fmt::format(
              "param_groups: \"{}\" is in two groups.", param.string()));
        }
      }
    }
    std::unordered_set<std::string> taken;
    for (const auto& optimizer_groups : groups_by_optimizer) {
      StateDict state;
      StateList kept;
      for (const Names& names : optimizer_groups) {
        kept.emplace_back(group_for(names, groups, group_of));
        for (const std::string& name : names) {
          taken.insert(name);
          if (const StateValue* entry = osd.at("state").dict().find(name)) {
            state.set(name, *entry);
          }
        }
      }
      parts.push_back(StateDict{
          {"state", std::move(state)}, {"param_groups", std::move(kept)}});
    }
    if (strict) {
      check_all_taken(osd, group_of, taken);
    }
  }

  std::vector<StateDict> parts; // by optimizer

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    raise<c10::ValueError>({.call = call_}, what);
  }

  void check_form(const StateDict& osd, const ModelParams& params, bool strict)
      const {
    for (const char* key : {"state", "param_groups"}) {
      if (!osd.contains(key)) {
        refuse(fmt::format(
            "the state dict has no \"{}\"; expected what get_optimizer_state_dict returns.",
            key));
      }
    }
    for (const auto& [key, value] : osd) {
      if (key != StateKey("state") && key != StateKey("param_groups")) {
        refuse(fmt::format(
            "the state dict has an unknown key \"{}\".", key.text()));
      }
    }
    IncompatibleKeys keys;
    for (const auto& [key, entry] : osd.at("state").dict()) {
      if (key.is_id()) {
        refuse(fmt::format(
            "the state dict has the number {} as a key, expected names of the model's parameters.",
            key.id()));
      }
      if (params.find(key.name()) == nullptr) {
        keys.unexpected.push_back("state." + key.name());
      }
    }
    if (strict && !keys.unexpected.empty()) {
      fsdp::refuse_incompatible(call_, keys, prefixed(params.names()));
    }
  }

  static Names prefixed(Names names) {
    for (std::string& name : names) {
      name = "state." + name;
    }
    return names;
  }

  StateDict group_for(
      const Names& names,
      const StateList& groups,
      const std::unordered_map<std::string, size_t>& group_of) const {
    std::optional<size_t> group;
    Names known;
    for (const auto& [name, g] : group_of) {
      known.push_back(name);
    }
    for (const std::string& name : names) {
      const auto found = group_of.find(name);
      if (found == group_of.end()) {
        refuse(fmt::format(
            "param_groups: the optimizer's parameter \"{}\" is missing.{}",
            name,
            state::did_you_mean(name, known)));
      }
      if (group && *group != found->second) {
        refuse(fmt::format(
            "param_groups: \"{}\" and \"{}\" are in one group of the optimizer, but in groups {} and {} of the state dict.",
            names.front(),
            name,
            *group,
            found->second));
      }
      group = found->second;
    }
    StateDict result = group ? groups[*group].dict() : StateDict();
    StateList params;
    for (const std::string& name : names) {
      params.emplace_back(name);
    }
    result.set("params", std::move(params));
    return result;
  }

  void check_all_taken(
      const StateDict& osd,
      const std::unordered_map<std::string, size_t>& group_of,
      const std::unordered_set<std::string>& taken) const {
    for (const auto& [name, group] : group_of) {
      if (!taken.contains(name)) {
        refuse(fmt::format(
            "param_groups.{}: \"{}\" is a parameter of none of the optimizers.",
            group,
            name));
      }
    }
    for (const auto& [key, entry] : osd.at("state").dict()) {
      if (!taken.contains(key.name())) {
        refuse(fmt::format(
            "state: \"{}\" is a parameter of none of the optimizers.",
            key.name()));
      }
    }
  }

  const char* call_;
};

} // namespace

StateDict get_model_state_dict(
    torch::nn::Module& model,
    const StateDictOptions& options,
    const Submodules& submodules) {
  constexpr const char* kCall = "get_model_state_dict";
  check_options(kCall, options);
  const ModelParams params(model, kCall);
  const Selection selection(
      kCall, model, submodules, options.keep_submodule_prefixes());
  reshard(model);
  ModelReader reader(params, options);
  std::vector<fsdp::StateEntry> entries;
  Names names;
  for (const fsdp::StateEntry& entry : fsdp::state_entries(model)) {
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
      result.set(names[i], values[i]);
    }
  }
  return result;
}

StateDict get_optimizer_state_dict(
    torch::nn::Module& model,
    const Optimizers& optimizers,
    const StateDictOptions& options,
    const Submodules& submodules) {
  constexpr const char* kCall = "get_optimizer_state_dict";
  check_options(kCall, options);
  const ModelParams params(model, kCall);
  const Selection selection(
      kCall, model, submodules, options.keep_submodule_prefixes());
  comm::together(params.groups(), kCall, [&] {
    for (torch::optim::Optimizer& optimizer : optimizers) {
      optim::initialize_state(optimizer);
    }
  });
  const Group group = group_for(params);
  StateDict result;
  for (torch::optim::Optimizer& optimizer : optimizers) {
    merge(
        result,
        fsdp::save_optim_state(
            model,
            {.call = kCall,
             .osd = optim::state_dict(optimizer),
             .tensors = fsdp::tensors_of(optimizer),
             .is_full = options.full_state_dict(),
             .rank0_only = options.full_state_dict() && options.cpu_offload(),
             .offload_to_cpu = options.cpu_offload(),
             .group = group.valid() ? std::optional(group) : std::nullopt}));
  }
  result = select(result, selection);
  return options.flatten_optimizer_state_dict() ? flatten_osd(result) : result;
}

ModelAndOptimizerState get_state_dict(
    torch::nn::Module& model,
    const Optimizers& optimizers,
    const StateDictOptions& options,
    const Submodules& submodules) {
  return {
      get_model_state_dict(model, options, submodules),
      get_optimizer_state_dict(model, optimizers, options, submodules)};
}

IncompatibleKeys set_model_state_dict(
    torch::nn::Module& model,
    const StateDict& model_state_dict,
    const StateDictOptions& options) {
  constexpr const char* kCall = "set_model_state_dict";
  check_options(kCall, options);
  const ModelParams params(model, kCall);
  const Group group = group_for(params);
  const bool is_needed =
      !options.broadcast_from_rank0() || !group.valid() || group.rank() == 0;
  comm::together(params.groups(), kCall, [&] {
    if (is_needed && model_state_dict.empty() &&
        !fsdp::state_entries(model).empty()) {
      raise(
          {.call = kCall},
          "the state dict is empty, but the model has state. Pass one, or with broadcast_from_rank0 on rank 0.");
    }
  });
  return fsdp::write_model_state(
      model,
      {.call = kCall,
       .dict = model_state_dict,
       .strict = options.strict(),
       .from_rank0 = options.broadcast_from_rank0(),
       .ignore_frozen = options.ignore_frozen_params()});
}

void set_optimizer_state_dict(
    torch::nn::Module& model,
    const Optimizers& optimizers,
    const StateDict& optim_state_dict,
    const StateDictOptions& options) {
  constexpr const char* kCall = "set_optimizer_state_dict";
  check_options(kCall, options);
  const ModelParams params(model, kCall);
  const Group group = group_for(params);
  const bool from_rank0 = options.broadcast_from_rank0() && group.valid();
  const bool has_state = !from_rank0 || group.rank() == 0;

  std::vector<fsdp::TensorGroups> tensors;
  std::vector<StateDict> parts(optimizers.size());
  comm::together(params.groups(), kCall, [&] {
    std::vector<std::vector<Names>> names;
    for (const torch::optim::Optimizer& optimizer : optimizers) {
      tensors.push_back(fsdp::tensors_of(optimizer));
      names.push_back(
          names_of(fsdp::OptimTensors(params, tensors.back(), kCall)));
    }
    if (!has_state) {
      return;
    }
    if (optim_state_dict.empty() && !optimizers.empty()) {
      raise(
          {.call = kCall},
          "the state dict is empty, but there are optimizers. Pass one, or with broadcast_from_rank0 on rank 0.");
    }
    const StateDict osd = options.flatten_optimizer_state_dict()
        ? unflatten_osd(kCall, optim_state_dict, names)
        : optim_state_dict;
    parts = Split(kCall, osd, params, names, options.strict()).parts;
  });

  std::vector<StateDict> to_load;
  for (size_t i = 0; i < optimizers.size(); ++i) {
    to_load.push_back(fsdp::load_optim_state(
        model,
        {.call = kCall,
         .osd = parts[i],
         .tensors = tensors[i],
         .from = from_rank0 ? fsdp::LoadFrom::Rank0 : fsdp::LoadFrom::Shards,
         .group = from_rank0 ? std::optional(group) : std::nullopt}));
  }

  // An optimizer checks a dictionary before it takes it; if one refuses, those
  // that came before, here and on other ranks, get theirs back.
  std::vector<StateDict> before;
  try {
    comm::together(params.groups(), kCall, [&] {
      for (size_t i = 0; i < optimizers.size(); ++i) {
        before.push_back(optim::state_dict(optimizers[i]));
        optim::load_state_dict(optimizers[i], to_load[i]);
      }
    });
  } catch (...) {
    for (size_t i = 0; i < before.size(); ++i) {
      optim::load_state_dict(optimizers[i], before[i]);
    }
    throw;
  }
}

IncompatibleKeys set_state_dict(
    torch::nn::Module& model,
    const Optimizers& optimizers,
    const ModelAndOptimizerState& state,
    const StateDictOptions& options) {
  const IncompatibleKeys keys =
      set_model_state_dict(model, state.model, options);
  set_optimizer_state_dict(model, optimizers, state.optimizer, options);
  return keys;
}

} // namespace tessera
