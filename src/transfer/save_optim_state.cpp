#include <tessera/error.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "base/byte_vector.h"
#include "comm/group/all_or_none.h"
#include "transfer/optim_transfer.h"

namespace tessera::transfer {

bool is_elementwise(
    std::string_view name,
    const StateValue& value,
    at::IntArrayRef like) {
  return value.is_tensor() && value.tensor().defined() &&
      value.tensor().sizes() == like && (!like.empty() || name != "step");
}

void check_form(const StateDict& osd, std::string_view call) {
  const auto refuse = [&](const std::string& what) {
    raise<c10::ValueError>({.call = call}, what);
  };
  const StateValue* state = osd.find("state");
  if (state == nullptr || !state->is_dict()) {
    refuse(
        "`optim_state_dict` must have the keys \"state\" and, unless it was taken out, \"param_groups\".");
  }
  for (const auto& [key, entry] : state->dict()) {
    if (!entry.is_dict()) {
      refuse(fmt::format(
          "state.{} is a {}, expected a dict.", key.text(), entry.kind()));
    }
    for (const auto& [name, value] : entry.dict()) {
      if (name.is_id()) {
        refuse(fmt::format(
            "state.{} has the number {} as a key, expected names of its values.",
            key.text(),
            name.id()));
      }
    }
  }
  const StateValue* groups = osd.find("param_groups");
  if (groups == nullptr) {
    return;
  }
  if (!groups->is_list()) {
    refuse(fmt::format(
        "param_groups is a {}, expected a list of dicts.", groups->kind()));
  }
  for (size_t g = 0; g < groups->list().size(); ++g) {
    const StateValue& group = groups->list()[g];
    const StateValue* params =
        group.is_dict() ? group.dict().find("params") : nullptr;
    if (params == nullptr || !params->is_list()) {
      refuse(fmt::format(
          "param_groups.{} is no dict with a list of \"params\".", g));
    }
    for (const StateValue& param : params->list()) {
      if (!param.is_int() && !param.is_string()) {
        refuse(fmt::format(
            "param_groups.{}.params has a {}, expected numbers or names.",
            g,
            param.kind()));
      }
    }
  }
}

StateKey key_of(const StateValue& param) {
  return param.is_int() ? StateKey(param.to_int()) : StateKey(param.string());
}

namespace {

/// [Note: catalogues]
///
/// What state a parameter has may differ from rank to rank: a rank without
/// elements of it has none. So ranks first tell each other what they have, in
/// one exchange of small dictionaries:
///
///   {name of the first parameter in a tensor of the optimizer:
///     {"elements": how many of its elements are not padding,
///      "tensors": {name of the state: dtype},
///      "values": {name of the state: value}}}
///
/// From then on every rank knows the same, decides the same, and throws the
/// same.
constexpr const char* kElements = "elements";
constexpr const char* kTensors = "tensors";
constexpr const char* kValues = "values";

/// What all ranks together have for one tensor of the optimizer.
struct Merged {
  std::vector<std::pair<std::string, at::ScalarType>> tensors;
  StateDict values;
};

class Saver {
 public:
  Saver(torch::nn::Module& module, const SaveRequest& request)
      : request_(request), model_(module, request.call) {}

  StateDict save() {
    comm::all_or_none(model_.groups(), request_.call, [this] { read_local(); });
    comm::for_each_group(
        model_.groups(), [this](const Group& group) { exchange(group); });
    const Group group = request_.group.value_or(model_.root_group());
    is_root_ = !group.valid() || group.rank() == 0;
    if (group.valid()) {
      root_ = group.global_ranks().front();
    }
    StateDict result = collect();
    return request_.rank0_only && !is_root_ ? StateDict() : result;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    raise<c10::ValueError>({.call = request_.call}, what);
  }

  /// Finds this rank's entries, and describes those of sharded parameters.
  void read_local() {
    tensors_.emplace(model_, request_.tensors, request_.call);
    check_form(request_.osd, request_.call);
    const auto by_key = keys();
    for (const auto& [key, entry] : request_.osd.at("state").dict()) {
      const auto found = by_key.find(key);
      if (found == by_key.end()) {
        if (key.is_id()) {
          refuse(fmt::format(
              "there is state for the optimizer's parameter {}, but it has {} of them.",
              key.id(),
              num_tensors()));
        }
        foreign_.emplace_back(key, entry);
        continue;
      }
      entries_[found->second->tensor.unsafeGetTensorImpl()] = &entry.dict();
      if (found->second->is_sharded()) {
        catalogue_.set(
            found->second->members.front()->name,
            describe(*found->second, entry.dict()));
      }
    }
  }

  int64_t num_tensors() const {
    int64_t count = 0;
    for (const auto& group : tensors_->groups()) {
      count += static_cast<int64_t>(group.size());
    }
    return count;
  }

  /// The optimizer's tensors by the keys that the dictionary has for them.
  std::map<StateKey, const OptimTensor*> keys() const {
    std::map<StateKey, const OptimTensor*> result;
    const StateValue* groups = request_.osd.find("param_groups");
    if (groups != nullptr &&
        groups->list().size() != tensors_->groups().size()) {
      refuse(fmt::format(
          "the dictionary has {} param_groups, the optimizer {}.",
          groups->list().size(),
          tensors_->groups().size()));
    }
    for (size_t g = 0; g < tensors_->groups().size(); ++g) {
      const auto& group = tensors_->groups()[g];
      const StateList* params = groups == nullptr
          ? nullptr
          : &groups->list()[g].dict().at("params").list();
      if (params != nullptr && params->size() != group.size()) {
        refuse(fmt::format(
            "param_groups.{} of the dictionary has {} params, the optimizer's has {}.",
            g,
            params->size(),
            group.size()));
      }
      for (size_t i = 0; i < group.size(); ++i) {
        if (params == nullptr) {
          result.emplace(group[i].id, &group[i]);
          result.emplace(group[i].members.front()->name, &group[i]);
        } else {
          result.emplace(key_of((*params)[i]), &group[i]);
        }
      }
    }
    return result;
  }

  StateDict describe(const OptimTensor& holder, const StateDict& entry) const {
    StateDict tensors;
    StateDict values;
    for (const auto& [key, value] : entry) {
      const std::string& name = key.name();
      if (is_elementwise(name, value, holder.tensor.sizes())) {
        tensors.set(name, static_cast<int64_t>(value.tensor().scalar_type()));
      } else if (value.is_tensor() && value.tensor().dim() > 0) {
        raise<c10::ValueError>(
            {.call = request_.call, .parameter = holder.members.front()->name},
            fmt::format(
                "its state \"{}\" has the shape [{}], its part of the parameter [{}]. Only state of one value for each element can be cut and joined.",
                name,
                fmt::join(value.tensor().sizes(), ", "),
                fmt::join(holder.tensor.sizes(), ", ")));
      } else if (value.is_sharded()) {
        raise<c10::ValueError>(
            {.call = request_.call, .parameter = holder.members.front()->name},
            fmt::format(
                "its state \"{}\" is a sharded tensor already; expected what an optimizer's own state dict has.",
                name));
      } else {
        values.set(name, value);
      }
    }
    int64_t elements = 0;
    for (const ModelParam* member : holder.members) {
      elements += member->run().numel;
    }
    return {
        {kElements, elements},
        {kTensors, std::move(tensors)},
        {kValues, std::move(values)}};
  }

  /// See [Note: catalogues].
  void exchange(const Group& group) {
    std::vector<StateDict> by_rank;
    for (const Bytes& bytes : group.all_gather_bytes(
             state_dict_to_bytes(catalogue_), "optimizer state")) {
      by_rank.push_back(state_dict_from_bytes(bytes));
    }
    check_flat(group, by_rank);
    for (const ModelParam& param : model_.all()) {
      if (param.is_sharded() && !merged_.contains(first_in_leaf(param)) &&
          param.unit->groups().all.name() == group.name()) {
        merge(group, param, by_rank);
      }
    }
  }

  const std::string& first_in_leaf(const ModelParam& param) const {
    return param.is_flat() ? model_.held_by(param.leaf).front()->name
                           : param.name;
  }

  static const StateDict* entry_of(
      const StateDict& catalogue,
      const std::string& name) {
    const StateValue* entry = catalogue.find(name);
    return entry == nullptr ? nullptr : &entry->dict();
  }

  /// A flat parameter has elements, or padding, on every rank: all have state
  /// for it or none.
  void check_flat(const Group& group, const std::vector<StateDict>& by_rank)
      const {
    std::map<int, std::vector<std::string>> missing;
    bool rank0_has_all = true;
    for (const ModelParam& param : model_.all()) {
      if (!param.is_flat() || first_in_leaf(param) != param.name ||
          param.unit->groups().all.name() != group.name()) {
        continue;
      }
      std::vector<int> without;
      for (size_t rank = 0; rank < by_rank.size(); ++rank) {
        if (entry_of(by_rank[rank], param.name) == nullptr) {
          without.push_back(group.global_ranks()[rank]);
        }
      }
      if (without.size() == by_rank.size()) {
        continue;
      }
      for (const int rank : without) {
        rank0_has_all = rank0_has_all && rank != group.global_ranks().front();
        for (const ModelParam* member : model_.held_by(param.leaf)) {
          missing[rank].push_back(member->name);
        }
      }
    }
    if (missing.empty()) {
      return;
    }
    std::string text = rank0_has_all
        ? "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but some ranks are missing some of those states"
        : "some ranks have optimizer states that others are missing";
    for (const auto& [rank, names] : missing) {
      text += fmt::format(
          "\nRank {} is missing states for the parameters: {}",
          rank,
          fmt::join(names, ", "));
    }
    raise<c10::Error>(
        {.call = request_.call},
        text + "\nGive the optimizer the same parameters on all ranks.");
  }

  /// Ranks that have elements, or of a flat parameter all, must have the same.
  void merge(
      const Group& group,
      const ModelParam& param,
      const std::vector<StateDict>& by_rank) {
    const std::string& name = first_in_leaf(param);
    const StateDict* first = nullptr;
    size_t first_rank = 0;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      const StateDict* entry = entry_of(by_rank[rank], name);
      const bool counts = entry != nullptr &&
          (param.is_flat() || entry->at(kElements).to_int() > 0);
      if (!counts) {
        continue;
      }
      if (first == nullptr) {
        first = entry;
        first_rank = rank;
        continue;
      }
      const std::string difference =
          diff_state_dicts(without_elements(*first), without_elements(*entry));
      if (!difference.empty()) {
        raise<c10::ValueError>(
            {.call = request_.call, .parameter = name},
            fmt::format(
                "ranks {} and {} have different state:\n{}",
                group.global_ranks()[first_rank],
                group.global_ranks()[rank],
                difference));
      }
    }
    check_all_parts(group, param, by_rank, first != nullptr);
    if (first == nullptr) { // perhaps values of ranks without elements
      for (const StateDict& catalogue : by_rank) {
        first = first == nullptr ? entry_of(catalogue, name) : first;
      }
    }
    if (first == nullptr) {
      return;
    }
    Merged merged;
    for (const auto& [key, dtype] : first->at(kTensors).dict()) {
      merged.tensors.emplace_back(
          key.name(), static_cast<at::ScalarType>(dtype.to_int()));
    }
    merged.values = first->at(kValues).dict();
    merged_.emplace(name, std::move(merged));
  }

  static StateDict without_elements(const StateDict& entry) {
    return {{kTensors, entry.at(kTensors)}, {kValues, entry.at(kValues)}};
  }

  void check_all_parts(
      const Group& group,
      const ModelParam& param,
      const std::vector<StateDict>& by_rank,
      bool any) const {
    if (!any || param.is_flat()) {
      return;
    }
    const engine::Layout& layout = param.layout();
    int64_t elements = 0;
    std::vector<int> having;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      if (const StateDict* entry = entry_of(by_rank[rank], param.name)) {
        elements += entry->at(kElements).to_int();
        having.push_back(group.global_ranks()[rank]);
      }
    }
    const int64_t copies =
        group.size() / static_cast<int64_t>(layout.num_ranks());
    if (elements != copies * layout.numel(param.place.index)) {
      raise<c10::ValueError>(
          {.call = request_.call, .parameter = param.name},
          fmt::format(
              "only ranks {} have state for it, {} of {} elements. Give the optimizer the same parameters on all ranks.",
              fmt::join(having, ", "),
              elements,
              copies * layout.numel(param.place.index)));
    }
  }

  /// Full tensors of sharded parameters, unit by unit.
  void gather_all() {
    std::vector<ParamPart> parts;
    std::vector<std::pair<const ModelParam*, std::string>> keys;
    for (const ModelParam& param : model_.all()) {
      const auto found = param.is_sharded() ? merged_.find(first_in_leaf(param))
                                            : merged_.end();
      if (found != merged_.end()) {
        for (const auto& [name, dtype] : found->second.tensors) {
          parts.push_back({&param, part_of(param, name, dtype)});
          keys.emplace_back(&param, name);
        }
      }
    }
    const auto wholes = gather(
        parts,
        request_.rank0_only ? std::optional(root_) : std::nullopt,
        request_.offload_to_cpu);
    for (size_t i = 0; i < keys.size(); ++i) {
      wholes_.emplace(keys[i], wholes[i]);
    }
  }

  /// A rank without elements may have no state.
  at::Tensor part_of(
      const ModelParam& param,
      const std::string& name,
      at::ScalarType dtype) const {
    const StateDict* entry = local_entry(param);
    const StateValue* mine = entry == nullptr ? nullptr : entry->find(name);
    return mine != nullptr
        ? param.part_of(mine->tensor())
        : at::empty(
              {0}, param.leaf.options().dtype(dtype).requires_grad(false));
  }

  StateDict collect() {
    if (request_.is_full) {
      gather_all();
    }
    StateDict state;
    for (const ModelParam& param : model_.all()) {
      if (!param.is_sharded()) {
        if (const StateDict* entry = local_entry(param)) {
          state.set(param.name, copy_of(*entry));
        }
      } else if (const auto found = merged_.find(first_in_leaf(param));
                 found != merged_.end()) {
        state.set(param.name, state_of(param, found->second));
      }
    }
    for (const auto& [key, entry] : foreign_) {
      state.set(key, copy_of(entry.dict()));
    }
    StateDict result{{"state", std::move(state)}};
    if (const StateValue* groups = request_.osd.find("param_groups")) {
      result.set("param_groups", named_groups(groups->list()));
    }
    return result;
  }

  const StateDict* local_entry(const ModelParam& param) const {
    const auto found = entries_.find(param.leaf.unsafeGetTensorImpl());
    return found == entries_.end() ? nullptr : found->second;
  }

  /// Of what is not sharded: full state is a copy, in host memory if asked for.
  StateDict copy_of(const StateDict& entry) const {
    StateDict result;
    for (const auto& [key, value] : entry) {
      result.set(key, copy_of(value));
    }
    return result;
  }

  StateValue copy_of(const StateValue& value) const {
    if (value.is_sharded()) { // of an optimizer that ranks share
      return request_.offload_to_cpu ? on_cpu(value.sharded()) : value;
    }
    if (!value.is_tensor() || !value.tensor().defined()) {
      return value.clone();
    }
    const at::Tensor tensor = value.tensor().detach();
    if (request_.offload_to_cpu && !tensor.is_cpu()) {
      return tensor.cpu();
    }
    return request_.is_full ? tensor.clone() : tensor;
  }

  static ShardedTensor on_cpu(const ShardedTensor& tensor) {
    std::vector<ShardedTensor::Piece> pieces;
    for (const ShardedTensor::Piece& piece : tensor.pieces()) {
      pieces.push_back({piece.box, piece.tensor.cpu()});
    }
    return ShardedTensor(
        tensor.sizes(), tensor.dtype(), std::move(pieces), tensor.group());
  }

  StateDict state_of(const ModelParam& param, const Merged& merged) {
    const StateDict* entry = local_entry(param);
    StateDict result;
    for (const auto& [name, dtype] : merged.tensors) {
      if (request_.is_full) {
        result.set(name, wholes_.at({&param, name}));
      } else {
        result.set(
            name,
            sharded(
                param, entry == nullptr ? nullptr : entry->find(name), dtype));
      }
    }
    for (const auto& [key, value] : merged.values) {
      result.set(key, copy_of(value));
    }
    return result;
  }

  StateValue sharded(
      const ModelParam& param,
      const StateValue* mine,
      at::ScalarType dtype) const {
    if (mine == nullptr) {
      return ShardedTensor(
          param.shape(), dtype, {}, param.unit->groups().shard);
    }
    const at::Tensor part = param.part_of(mine->tensor());
    return param.sharded(request_.offload_to_cpu ? part.cpu() : part);
  }

  StateList named_groups(const StateList& groups) const {
    StateList result;
    for (size_t g = 0; g < groups.size(); ++g) {
      StateDict group = groups[g].dict().clone();
      StateList names;
      for (const OptimTensor& tensor : tensors_->groups()[g]) {
        for (const ModelParam* member : tensor.members) {
          names.emplace_back(member->name);
        }
      }
      group.set("params", std::move(names));
      result.emplace_back(std::move(group));
    }
    return result;
  }

  const SaveRequest& request_;
  const ModelParams model_;
  std::optional<OptimTensors> tensors_;
  /// This rank's, by the optimizer's tensor.
  std::unordered_map<const c10::TensorImpl*, const StateDict*> entries_;
  std::vector<std::pair<StateKey, StateValue>> foreign_; // not of the model
  StateDict catalogue_;
  std::unordered_map<std::string, Merged> merged_; // by first_in_leaf()
  std::map<std::pair<const ModelParam*, std::string>, at::Tensor> wholes_;
  bool is_root_ = true;
  int root_ = 0; // a rank of the world
};

} // namespace

StateDict save_optim_state(
    torch::nn::Module& model,
    const SaveRequest& request) {
  return Saver(model, request).save();
}

} // namespace tessera::transfer
