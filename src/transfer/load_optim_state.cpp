#include <tessera/comm/agree.h>
#include <tessera/error.h>
#include <tessera/optim/state_dict.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/byte_vector.h"
#include "comm/group/all_or_none.h"
#include "engine/start.h"
#include "libtorch/huge_pages.h"
#include "optim/dictionary.h"
#include "state/describe.h"
#include "state/nearest.h"
#include "transfer/optim_transfer.h"
#include "transfer/sharded_sources.h"

namespace tessera::transfer {
namespace {

/// Shape and dtype of a tensor, whoever has it.
struct Like {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

/// Nothing for what has no elements of its own: plain values, scalars.
std::optional<Like> like_of(
    const std::string& name,
    const StateValue& value,
    at::IntArrayRef shape) {
  if (value.is_sharded()) {
    return Like{value.sharded().sizes(), value.sharded().dtype()};
  }
  if (value.is_tensor() && value.tensor().defined() &&
      (value.tensor().dim() > 0 || is_elementwise(name, value, shape))) {
    return Like{value.tensor().sizes().vec(), value.tensor().scalar_type()};
  }
  return std::nullopt;
}

/// What one tensor of an optimizer is to have: a plain value, or parts of the
/// tensors of its members, where a null one means zeros.
struct Wanted {
  std::string name;
  std::optional<at::ScalarType> dtype; // of tensors
  std::vector<const StateValue*> by_member; // of tensors
  StateValue value;
};

class Loader {
 public:
  Loader(torch::nn::Module& module, const LoadRequest& request)
      : request_(request),
        model_(module, request.call),
        group_(request.group.value_or(model_.root_group())) {}

  StateDict load() {
    // What can go wrong on one rank alone is found before ranks depend on each
    // other.
    comm::all_or_none(groups(), request_.call, [this] {
      tensors_.emplace(model_, request_.tensors, request_.call);
      receives_ = is_from_rank0() && group_.rank() != 0;
      if (is_from_rank0()) {
        check_roots();
      }
      if (!receives_) {
        plan(request_.osd);
      }
    });
    compare();
    if (is_from_rank0()) {
      skeleton_ = broadcast_skeleton();
      comm::all_or_none(groups(), request_.call, [this] { plan(skeleton_); });
    }
    return assemble();
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    raise<c10::ValueError>({.call = request_.call}, what);
  }

  bool is_from_rank0() const {
    return request_.from == LoadFrom::Rank0 && group_.valid();
  }

  void check_roots() const {
    for (const ModelParam& param : model_.all()) {
      if (param.is_sharded()) {
        check_root(param, group_.global_ranks().front(), request_.call);
      }
    }
  }

  // ---- What each tensor of the optimizer is to have

  /// One for each leaf of the model that gets state, in the model's order.
  struct Plan {
    std::vector<const ModelParam*> members;
    std::vector<Wanted> wanted;
  };

  void plan(const StateDict& osd) {
    osd_ = &osd;
    plans_.clear();
    check_form(osd, request_.call);
    const StateDict& state = osd.at("state").dict();
    for (const auto& [key, entry] : state) {
      if (key.is_id()) {
        refuse(fmt::format(
            "`optim_state_dict` has the number {} as a key, expected names of the model's parameters. rekey_optim_state_dict() changes them.",
            key.id()));
      }
      refuse_sharded_source(key.name(), entry.dict());
    }
    for (const ModelParam& param : model_.all()) {
      const auto members = model_.held_by(param.leaf);
      if (members.front() == &param) {
        if (auto wanted = wanted_for(members, state)) {
          plans_.push_back({members, std::move(*wanted)});
        }
      }
    }
    groups_to_load_.reset();
    if (const StateValue* groups = osd.find("param_groups")) {
      groups_to_load_ = groups_of(groups->list());
    }
  }

  /// Rank 0 must have full tensors.
  void refuse_sharded_source(const std::string& param, const StateDict& entry)
      const {
    for (const auto& [name, value] : entry) {
      if (value.is_sharded() && is_from_rank0() && osd_ == &request_.osd) {
        raise<c10::ValueError>(
            {.call = request_.call, .parameter = param},
            fmt::format(
                "its state \"{}\" is a sharded tensor; rank 0 must have full tensors.",
                name.name()));
      }
    }
  }

  std::optional<std::vector<Wanted>> wanted_for(
      const std::vector<const ModelParam*>& members,
      const StateDict& state) const {
    std::vector<const StateDict*> entries; // by member, null for none
    const StateDict* first = nullptr;
    for (const ModelParam* member : members) {
      const StateValue* entry = state.find(member->name);
      entries.push_back(entry == nullptr ? nullptr : &entry->dict());
      first = first == nullptr ? entries.back() : first;
    }
    if (first == nullptr) {
      return std::nullopt;
    }
    check_names(members, entries, *first);
    std::vector<Wanted> result;
    for (const auto& [key, value] : *first) {
      result.push_back(combine(key.name(), members, entries));
    }
    return result;
  }

  void check_names(
      const std::vector<const ModelParam*>& members,
      const std::vector<const StateDict*>& entries,
      const StateDict& first) const {
    for (size_t i = 0; i < members.size(); ++i) {
      if (entries[i] == nullptr) {
        continue;
      }
      auto ours = entries[i]->keys();
      auto theirs = first.keys();
      std::sort(ours.begin(), ours.end());
      std::sort(theirs.begin(), theirs.end());
      if (ours != theirs) {
        raise<c10::ValueError>(
            {.call = request_.call, .parameter = members[i]->name},
            fmt::format(
                "Differing optimizer state names for the parameters of one flat parameter: {} against {}.",
                text_of(ours),
                text_of(theirs)));
      }
    }
  }

  static std::string text_of(const std::vector<StateKey>& keys) {
    std::vector<std::string> names;
    for (const StateKey& key : keys) {
      names.push_back(key.text());
    }
    return fmt::format("[{}]", fmt::join(names, ", "));
  }

  /// One state of a tensor of the optimizer from those of its members.
  Wanted combine(
      const std::string& name,
      const std::vector<const ModelParam*>& members,
      const std::vector<const StateDict*>& entries) const {
    Wanted wanted{name, std::nullopt, {}, {}};
    bool is_first = true;
    bool is_tensor = false;
    bool is_missing = false;
    for (size_t i = 0; i < members.size(); ++i) {
      const StateValue* value =
          entries[i] == nullptr ? nullptr : entries[i]->find(name);
      wanted.by_member.push_back(value);
      if (value == nullptr) {
        is_missing = true;
        continue;
      }
      const auto shape = members[i]->shape();
      const auto like = like_of(name, *value, shape);
      if (like && like->sizes != shape) {
        raise<c10::ValueError>(
            {.call = request_.call, .parameter = members[i]->name},
            fmt::format(
                "its state \"{}\" has the shape [{}], the parameter [{}].",
                name,
                fmt::join(like->sizes, ", "),
                fmt::join(shape, ", ")));
      }
      if (is_first) {
        is_tensor = like.has_value();
        wanted.value = like ? StateValue() : value->clone();
        wanted.dtype = like ? std::optional(like->dtype) : std::nullopt;
        is_first = false;
      } else if (
          is_tensor != like.has_value() ||
          (like && *wanted.dtype != like->dtype)) {
        raise<c10::ValueError>(
            {.call = request_.call, .parameter = members[i]->name},
            fmt::format(
                "its state \"{}\" is {}, that of the other parameters in one flat parameter is not.",
                name,
                state::describe(*value)));
      } else if (!is_tensor && wanted.value != *value) {
        refuse_scalars(name, members, entries);
      }
    }
    if (!is_tensor && is_missing) {
      refuse_scalars(name, members, entries);
    }
    return wanted;
  }

  /// PyTorch's words, which begin the text there.
  [[noreturn]] void refuse_scalars(
      const std::string& name,
      const std::vector<const ModelParam*>& members,
      const std::vector<const StateDict*>& entries) const {
    std::string text =
        "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and dtype. Got for \"" +
        name + "\":";
    for (size_t i = 0; i < members.size(); ++i) {
      const StateValue* value =
          entries[i] == nullptr ? nullptr : entries[i]->find(name);
      text += fmt::format(
          "{} {}: {}",
          i == 0 ? "" : ",",
          members[i]->name,
          value == nullptr ? "nothing" : state::describe(*value));
    }
    raise<c10::ValueError>({}, text + ".");
  }

  // ---- What ranks tell each other first

  /// Throws on all ranks if they were given different dictionaries where that
  /// must not be.
  void compare() {
    if (request_.from == LoadFrom::Rank0 ||
        request_.from == LoadFrom::Everywhere) {
      return;
    }
    comm::for_each_group(groups(), [this](const Group& group) {
      agree(group, request_.call, lines());
    });
    if (request_.from == LoadFrom::Shards) {
      add_incoming();
      incoming_.agree(groups(), request_.call);
    }
  }

  /// Who must agree.
  std::vector<Group> groups() const {
    if (request_.from == LoadFrom::Everywhere) {
      return {};
    }
    if (request_.from == LoadFrom::Rank0) {
      return is_from_rank0() ? std::vector<Group>{group_}
                             : std::vector<Group>();
    }
    return model_.groups();
  }

  /// What must be the same on all ranks.
  std::vector<std::string> lines() const {
    std::vector<std::string> result;
    for (const Plan& plan : plans_) {
      const bool is_everybodys = plan.members.front()->is_sharded();
      std::string line = plan.members.front()->name + ":";
      for (const Wanted& wanted : plan.wanted) {
        bool is_sharded = false;
        for (const StateValue* value : wanted.by_member) {
          is_sharded = is_sharded || (value != nullptr && value->is_sharded());
        }
        // What is not sharded here may be a rank's own, unless all ranks must
        // put it together.
        if (is_everybodys || is_sharded) {
          line += " " + wanted.name + "=" +
              (wanted.dtype ? c10::toString(*wanted.dtype)
                            : state::describe(wanted.value).c_str()) +
              (is_sharded ? " sharded" : "");
        }
        if (is_everybodys) {
          line += digests_of(wanted);
        }
      }
      result.push_back(std::move(line));
    }
    std::erase_if(
        result, [](const std::string& line) { return line.ends_with(':'); });
    if (groups_to_load_) {
      for (const StateValue& group : *groups_to_load_) {
        std::string line = "param_groups:";
        for (const auto& [key, value] : group.dict()) {
          if (key != StateKey("params")) {
            line += " " + key.text() + "=" + text_of(value);
          }
        }
        result.push_back(std::move(line));
      }
    }
    return result;
  }

  /// Full tensors, of which each rank takes its part, must be the same ones.
  static std::string digests_of(const Wanted& wanted) {
    std::string text;
    for (const StateValue* value : wanted.by_member) {
      if (value != nullptr && value->is_tensor() && value->tensor().defined()) {
        text += fmt::format(
            " with the digest {:016x}", engine::digest_of(value->tensor()));
      }
    }
    return text;
  }

  /// With the items of lists, which betas are.
  static std::string text_of(const StateValue& value) {
    if (!value.is_list()) {
      return state::describe(value);
    }
    std::string text;
    for (const StateValue& item : value.list()) {
      text += (text.empty() ? "" : ", ") + state::describe(item);
    }
    return "[" + text + "]";
  }

  void add_incoming() {
    for (const Plan& plan : plans_) {
      for (const Wanted& wanted : plan.wanted) {
        for (size_t i = 0; i < plan.members.size(); ++i) {
          const StateValue* value = wanted.by_member[i];
          if (wanted.dtype && value != nullptr && value->is_sharded()) {
            incoming_.add(
                *plan.members[i], value->sharded(), keeps(*plan.members[i]));
          }
        }
      }
    }
  }

  /// Rank 0's dictionary with sharded tensors of no pieces in place of those
  /// that are large.
  StateDict broadcast_skeleton() const {
    Bytes bytes;
    if (!receives_) {
      StateDict skeleton = request_.osd;
      for (const auto& [key, entry] : request_.osd.at("state").dict()) {
        StateDict& copy = skeleton.at("state").dict().at(key).dict();
        const ModelParam* param = model_.find(key.name());
        const auto shape =
            param == nullptr ? std::vector<int64_t>() : param->shape();
        for (const auto& [name, value] : entry.dict()) {
          if (const auto like = like_of(name.name(), value, shape)) {
            copy.set(name, ShardedTensor(like->sizes, like->dtype, {}, group_));
          }
        }
      }
      bytes = state_dict_to_bytes(skeleton);
    }
    return state_dict_from_bytes(
        group_.broadcast_bytes(bytes, 0, "optimizer state to load"), group_);
  }

  // ---- Moving

  StateDict assemble() {
    StateDict state;
    std::unordered_map<const ModelParam*, StateDict> by_first;
    for (const Plan& plan : plans_) {
      by_first.emplace(plan.members.front(), state_of(plan));
    }
    scatter_all();
    add_loaded(state, by_first);
    add_foreign(state);
    StateDict result{{"state", std::move(state)}};
    if (groups_to_load_) {
      result.set("param_groups", std::move(*groups_to_load_));
    }
    return result;
  }

  /// In the optimizer's order. A rank without elements of a parameter gets no
  /// state for it.
  void add_loaded(
      StateDict& state,
      std::unordered_map<const ModelParam*, StateDict>& by_first) const {
    for (const auto& group : tensors_->groups()) {
      for (const OptimTensor& one : group) {
        const auto found = by_first.find(one.members.front());
        if (found != by_first.end()) {
          if (one.tensor.numel() > 0 || !one.is_sharded()) {
            state.set(key_of(one), std::move(found->second));
          }
          by_first.erase(found);
        }
      }
    }
    for (const ModelParam& param : model_.all()) {
      const auto found = by_first.find(&param); // not of this optimizer
      if (found != by_first.end() && param.leaf.numel() > 0) {
        state.set(param.name, std::move(found->second));
      }
    }
  }

  /// Names that the model does not have stay as they are.
  void add_foreign(StateDict& state) const {
    for (const auto& [key, entry] : osd_->at("state").dict()) {
      if (model_.find(key.name()) != nullptr) {
        continue;
      }
      StateDict copy;
      for (const auto& [name, value] : entry.dict()) {
        copy.set(
            name,
            value.is_sharded() && is_from_rank0()
                ? StateValue(broadcast_whole(key.name(), name.name()))
                : value.clone());
      }
      state.set(key, std::move(copy));
    }
  }

  StateKey key_of(const OptimTensor& one) const {
    if (!request_.keeps_names) {
      return one.id;
    }
    if (one.members.size() > 1) {
      raise<c10::NotImplementedError>(
          {.call = request_.call, .parameter = one.members.front()->name},
          "a flat parameter has no name of its own. Use use_orig_params(true) with named optimizers.");
    }
    return one.members.front()->name;
  }

  StateDict state_of(const Plan& plan) {
    StateDict result;
    const ModelParam& first = *plan.members.front();
    for (const Wanted& wanted : plan.wanted) {
      if (!wanted.dtype) {
        result.set(wanted.name, wanted.value);
      } else if (!first.is_sharded()) {
        result.set(
            wanted.name,
            whole_of(first, wanted.name, *wanted.by_member.front()));
      } else {
        result.set(wanted.name, leaf_state(plan.members, wanted));
      }
    }
    return result;
  }

  /// One state of a sharded leaf. Padding is zero, and so are members that have
  /// none.
  at::Tensor leaf_state(
      const std::vector<const ModelParam*>& members,
      const Wanted& wanted) {
    const ModelParam& first = *members.front();
    const auto options =
        first.leaf.options().dtype(*wanted.dtype).requires_grad(false);
    const at::Tensor whole =
        engine::empty_to_fill({first.leaf.sizes().vec()}, {options}).front();
    int64_t filled = 0;
    for (size_t i = 0; i < members.size(); ++i) {
      filled += wanted.by_member[i] == nullptr ? 0 : members[i]->run().numel;
    }
    if (filled != whole.numel()) {
      whole.zero_();
    }
    for (size_t i = 0; i < members.size(); ++i) {
      if (const StateValue* value = wanted.by_member[i]) {
        fill(*members[i], wanted.name, *value, whole);
      }
    }
    return whole;
  }

  /// Of a parameter that is not sharded.
  at::Tensor whole_of(
      const ModelParam& param,
      const std::string& name,
      const StateValue& value) const {
    const bool is_kept = keeps(param);
    if (value.is_tensor()) {
      return is_kept ? value.tensor().detach().clone()
                     : without_values(value.tensor().options(), param);
    }
    // Ranks that do not keep it take part where all must.
    const at::Tensor whole = is_from_rank0()
        ? broadcast_whole(param.name, name)
        : incoming_.take(param, value.sharded());
    if (!is_kept) {
      return without_values(
          at::TensorOptions().dtype(value.sharded().dtype()), param);
    }
    return is_from_rank0() ? whole : whole.clone().view(param.shape());
  }

  bool keeps(const ModelParam& param) const {
    return param.is_sharded() || !request_.keeps || request_.keeps(param.leaf);
  }

  static at::Tensor without_values(
      const at::TensorOptions& options,
      const ModelParam& param) {
    return at::empty(param.shape(), options.device(at::kMeta));
  }

  /// What rank 0 has for it, on every rank.
  at::Tensor broadcast_whole(const std::string& param, const std::string& name)
      const {
    const StateValue& like = osd_->at("state").dict().at(param).dict().at(name);
    const at::Tensor whole = receives_
        ? at::empty(
              like.sharded().sizes(),
              at::TensorOptions().dtype(like.sharded().dtype()))
        : root_tensor(param, name).cpu().clone().contiguous();
    group_.broadcast(whole, 0, param + "." + name);
    return whole;
  }

  at::Tensor root_tensor(const std::string& param, const std::string& name)
      const {
    return request_.osd.at("state")
        .dict()
        .at(param)
        .dict()
        .at(name)
        .tensor()
        .detach();
  }

  /// Writes this rank's part of the parameter's state into `whole`, which is
  /// laid out as the leaf is; what comes from rank 0, in scatter_all().
  void fill(
      const ModelParam& param,
      const std::string& name,
      const StateValue& value,
      const at::Tensor& whole) {
    const engine::Run run = param.run();
    const at::Tensor flat = whole.view({-1});
    const at::Tensor part =
        param.is_flat() ? flat.narrow(0, run.shard_begin, run.numel) : flat;
    if (is_from_rank0()) {
      parts_.push_back({&param, part});
      sources_.push_back(
          receives_ ? at::Tensor() : root_tensor(param.name, name));
    } else if (value.is_tensor()) {
      part.copy_(part_of_whole(param, value.tensor()));
    } else {
      part.copy_(incoming_.take(param, value.sharded()));
    }
  }

  void scatter_all() {
    if (!parts_.empty()) {
      scatter(sources_, parts_, group_.global_ranks().front());
    }
  }

  // ---- Groups

  StateList groups_of(const StateList& groups) const {
    StateList result;
    for (const StateValue& group : groups) {
      StateDict copy = group.dict().clone();
      if (!request_.keeps_names) {
        copy.set("params", ids_of(group.dict().at("params").list()));
      }
      result.emplace_back(std::move(copy));
    }
    return result;
  }

  StateList ids_of(const StateList& names) const {
    std::set<int64_t> ids;
    for (const StateValue& name : names) {
      if (!name.is_string()) {
        refuse(
            "param_groups: \"params\" has numbers, expected names of the model's parameters. rekey_optim_state_dict() changes them.");
      }
      const ModelParam* param = model_.find(name.string());
      const OptimTensor* holder =
          param == nullptr ? nullptr : tensors_->holder_of(*param);
      if (holder == nullptr) {
        refuse(fmt::format(
            "param_groups: \"{}\" is not a parameter of the {}.{}",
            name.string(),
            param == nullptr ? "model" : "optimizer",
            param == nullptr
                ? state::did_you_mean(name.string(), model_.names())
                : ""));
      }
      ids.insert(holder->id);
    }
    StateList result;
    for (const int64_t id : ids) {
      result.emplace_back(id);
    }
    return result;
  }

  const LoadRequest& request_;
  const ModelParams model_;
  const Group group_; // whose rank 0; none: nothing is sharded
  std::optional<OptimTensors> tensors_;
  bool receives_ = false; // from rank 0
  StateDict skeleton_;
  const StateDict* osd_ = nullptr; // request_.osd or skeleton_
  std::vector<Plan> plans_;
  std::optional<StateList> groups_to_load_;
  ShardedSources incoming_;
  std::vector<ParamPart> parts_; // to come from rank 0
  std::vector<at::Tensor> sources_; // there
};

} // namespace

StateDict load_optim_state(
    torch::nn::Module& model,
    const LoadRequest& request) {
  return Loader(model, request).load();
}

Snapshots load_together(
    const std::vector<Group>& groups,
    std::string_view call,
    const OptimizerRefs& optimizers,
    const std::vector<StateDict>& dicts) {
  Snapshots before;
  try {
    comm::all_or_none(groups, call, [&] {
      for (size_t i = 0; i < optimizers.size(); ++i) {
        before.push_back(optim::snapshot(optimizers[i]));
        optim::load_state_dict(optimizers[i], dicts[i]);
      }
    });
  } catch (...) {
    load_back(before);
    throw;
  }
  return before;
}

void load_back(const Snapshots& before) {
  for (const auto& give_back : before) {
    give_back();
  }
}

} // namespace tessera::transfer
