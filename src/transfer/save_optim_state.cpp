#include "transfer/save_optim_state.h"

#include <tessera/error.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <map>
#include <unordered_map>

#include "base/byte_vector.h"
#include "comm/group/all_or_none.h"
#include "transfer/optim_catalogue.h"
#include "transfer/optim_dict_form.h"
#include "transfer/param_parts.h"

namespace tessera::transfer {

namespace {

class Saver {
 public:
  Saver(torch::nn::Module& module, const SaveRequest& request)
      : request_(request),
        model_(module, request.call),
        catalogue_(model_, request.call) {}

  StateDict save() {
    comm::all_or_none(model_.groups(), request_.call, [this] { read_local(); });
    comm::for_each_group(model_.groups(), [this](const Group& group) {
      catalogue_.exchange(group);
    });
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

  /// Finds this rank's entries, and adds those of sharded parameters to the
  /// catalogue.
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
        catalogue_.add(*found->second, entry.dict());
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

  /// Full tensors of sharded parameters, unit by unit.
  void gather_all() {
    std::vector<ParamPart> parts;
    std::vector<std::pair<const ModelParam*, std::string>> keys;
    for (const ModelParam& param : model_.all()) {
      const MergedState* merged =
          param.is_sharded() ? catalogue_.find(param) : nullptr;
      if (merged == nullptr) {
        continue;
      }
      for (const auto& [name, dtype] : merged->tensors) {
        parts.push_back({&param, part_of(param, name, dtype)});
        keys.emplace_back(&param, name);
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

  /// This rank's part of a state. A rank without elements may have no state.
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
      } else if (const MergedState* merged = catalogue_.find(param)) {
        state.set(param.name, state_of(param, *merged));
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

  /// State of a parameter that is not sharded: full state is a copy, in host
  /// memory if asked for.
  StateDict copy_of(const StateDict& entry) const {
    StateDict result;
    for (const auto& [key, value] : entry) {
      result.set(key, copy_of(value));
    }
    return result;
  }

  StateValue copy_of(const StateValue& value) const {
    if (value.is_sharded()) { // an optimizer that shards its own state
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

  StateDict state_of(const ModelParam& param, const MergedState& merged) {
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
  /// This rank's entries, by the optimizer's tensor.
  std::unordered_map<const c10::TensorImpl*, const StateDict*> entries_;
  /// Entries for names that the model does not have.
  std::vector<std::pair<StateKey, StateValue>> foreign_;
  OptimCatalogue catalogue_;
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
