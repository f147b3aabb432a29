#include "transfer/load_optim_state.h"

#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include <ATen/ops/empty.h>

#include <unordered_map>

#include "base/byte_vector.h"
#include "base/fnv.h"
#include "comm/group/all_or_none.h"
#include "engine/schedule.h"
#include "libtorch/huge_pages.h"
#include "optim/state_values.h"
#include "transfer/load_agreement.h"
#include "transfer/optim_dict_form.h"
#include "transfer/optim_group_ids.h"
#include "transfer/rank0_optim_source.h"
#include "transfer/sharded_sources.h"
#include "transfer/wanted_state.h"

namespace tessera::transfer {
namespace {

class Loader {
 public:
  Loader(torch::nn::Module& module, const LoadRequest& request)
      : request_(request),
        model_(module, request.call),
        group_(request.group.value_or(model_.root_group())) {
    if (request.from == LoadFrom::Rank0 && group_.valid()) {
      rank0_.emplace(model_, request.osd, group_, request.call);
    }
  }

  StateDict load() {
    // Errors of one rank alone are found before ranks depend on each other.
    comm::all_or_none(groups(), request_.call, [this] {
      tensors_.emplace(model_, request_.tensors, request_.call);
      if (rank0_) {
        rank0_->check_reach();
      }
      if (!rank0_ || !rank0_->receives()) {
        plan(request_.osd);
      }
    });
    compare();
    if (rank0_) {
      skeleton_ = rank0_->broadcast_skeleton();
      comm::all_or_none(groups(), request_.call, [this] { plan(skeleton_); });
    }
    return assemble();
  }

 private:
  /// Finds what each tensor of the optimizer is to have.
  void plan(const StateDict& osd) {
    osd_ = &osd;
    check_form(osd, request_.call);
    check_keys_are_names(osd, request_.call);
    if (rank0_ && osd_ == &request_.osd) {
      rank0_->check_values();
    }
    leaves_ = wanted_leaves(model_, osd.at("state").dict(), request_.call);
    param_groups_.reset();
    if (const StateValue* groups = osd.find("param_groups")) {
      param_groups_ = request_.keeps_names
          ? groups->clone().list()
          : with_ids(groups->list(), model_, *tensors_, request_.call);
    }
  }

  /// Throws on all ranks if their dictionaries differ where they must not.
  void compare() {
    if (request_.from == LoadFrom::Rank0) {
      return;
    }
    if (request_.from == LoadFrom::Everywhere) {
      compare_later();
      return;
    }
    comm::for_each_group(groups(), [this](const Group& group) {
      agree(group, request_.call, lines_to_agree(leaves_, param_groups_));
    });
    if (request_.from == LoadFrom::Shards) {
      add_incoming();
      incoming_.agree(groups(), request_.call);
    }
  }

  /// The call is not collective: the ranks compare their dictionaries at the
  /// end of the model's next backward.
  void compare_later() {
    uint64_t digest = kFnvStart;
    for (const std::string& line : lines_to_agree(leaves_, param_groups_)) {
      digest = mix_digest(digest, line);
    }
    for (const WantedLeaf& leaf : leaves_) {
      const ModelParam& first = *leaf.members.front();
      if (first.is_sharded()) {
        first.unit->schedule().check().plain().add_once(
            std::string(request_.call), digest);
      }
    }
  }

  /// The groups whose ranks must agree.
  std::vector<Group> groups() const {
    if (request_.from == LoadFrom::Everywhere) {
      return {};
    }
    if (request_.from == LoadFrom::Rank0) {
      return rank0_ ? std::vector<Group>{group_} : std::vector<Group>();
    }
    return model_.groups();
  }

  void add_incoming() {
    for (const WantedLeaf& leaf : leaves_) {
      for (const WantedState& wanted : leaf.states) {
        for (size_t i = 0; i < leaf.members.size(); ++i) {
          const StateValue* value = wanted.by_member[i];
          if (wanted.dtype && value != nullptr && value->is_sharded()) {
            incoming_.add(
                *leaf.members[i], value->sharded(), keeps(*leaf.members[i]));
          }
        }
      }
    }
  }

  StateDict assemble() {
    StateDict state;
    std::unordered_map<const ModelParam*, StateDict> by_first;
    for (const WantedLeaf& leaf : leaves_) {
      by_first.emplace(leaf.members.front(), state_of(leaf));
    }
    if (rank0_) {
      rank0_->scatter_parts();
    }
    add_loaded(state, by_first);
    add_foreign(state);
    StateDict result{{"state", std::move(state)}};
    if (param_groups_) {
      result.set("param_groups", std::move(*param_groups_));
    }
    return result;
  }

  /// Adds state in the optimizer's order. A rank without elements of a
  /// parameter gets no state for it.
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
      const auto found = by_first.find(&param); // another optimizer holds it
      if (found != by_first.end() && param.leaf.numel() > 0) {
        state.set(param.name, std::move(found->second));
      }
    }
  }

  /// Adds the entries of names that the model does not have, unchanged.
  void add_foreign(StateDict& state) const {
    for (const auto& [key, entry] : osd_->at("state").dict()) {
      if (model_.find(key.name()) != nullptr) {
        continue;
      }
      StateDict copy;
      for (const auto& [name, value] : entry.dict()) {
        copy.set(
            name,
            value.is_sharded() && rank0_
                ? StateValue(rank0_->broadcast_whole(
                      key.name(), name.name(), value.sharded()))
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

  StateDict state_of(const WantedLeaf& leaf) {
    StateDict result;
    const ModelParam& first = *leaf.members.front();
    for (const WantedState& wanted : leaf.states) {
      if (!wanted.dtype) {
        result.set(wanted.name, wanted.value);
      } else if (!first.is_sharded()) {
        result.set(
            wanted.name,
            whole_of(first, wanted.name, *wanted.by_member.front()));
      } else {
        result.set(wanted.name, leaf_state(leaf.members, wanted));
      }
    }
    return result;
  }

  /// One state of a sharded leaf. Padding is zero, and so is the part of a
  /// member without this state.
  at::Tensor leaf_state(
      const std::vector<const ModelParam*>& members,
      const WantedState& wanted) {
    const ModelParam& first = *members.front();
    if (const at::Tensor own = tensor_in_place(members, wanted);
        own.defined()) {
      return own;
    }
    const auto options =
        first.leaf.options().dtype(*wanted.dtype).requires_grad(false);
    const at::Tensor whole =
        libtorch::empty_to_fill({first.leaf.sizes().vec()}, {options}).front();
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

  /// The optimizer's own tensor, if the values of all members lie in it
  /// already: a checkpoint was loaded in place.
  at::Tensor tensor_in_place(
      const std::vector<const ModelParam*>& members,
      const WantedState& wanted) const {
    const at::Tensor& leaf = members.front()->leaf;
    const at::Tensor own = rank0_ || !request_.current
        ? at::Tensor()
        : request_.current(leaf, wanted.name);
    if (!own.defined() || own.scalar_type() != *wanted.dtype ||
        own.sizes() != leaf.sizes() || !own.is_contiguous()) {
      return {};
    }
    for (size_t i = 0; i < members.size(); ++i) {
      const StateValue* value = wanted.by_member[i];
      if (value == nullptr || !value->is_sharded() ||
          !incoming_.is_in(
              *members[i], value->sharded(), part_of(*members[i], own))) {
        return {};
      }
    }
    return own;
  }

  /// This rank's part of the parameter in a tensor that is laid out as the
  /// leaf is.
  static at::Tensor part_of(const ModelParam& param, const at::Tensor& whole) {
    const engine::Run run = param.run();
    const at::Tensor flat = whole.view({-1});
    return param.is_flat() ? flat.narrow(0, run.shard_begin, run.numel) : flat;
  }

  /// One state of a parameter that is not sharded.
  at::Tensor whole_of(
      const ModelParam& param,
      const std::string& name,
      const StateValue& value) const {
    const bool is_kept = keeps(param);
    if (is_kept && value.is_tensor() && request_.current &&
        optim::is_same_memory(
            request_.current(param.leaf, name), value.tensor())) {
      return value.tensor();
    }
    if (value.is_tensor()) {
      return is_kept ? value.tensor().detach().clone()
                     : without_values(value.tensor().options(), param);
    }
    // Ranks that do not keep the state still take part in collectives.
    const at::Tensor whole = rank0_
        ? rank0_->broadcast_whole(param.name, name, value.sharded())
        : incoming_.take(param, value.sharded());
    if (!is_kept) {
      return without_values(
          at::TensorOptions().dtype(value.sharded().dtype()), param);
    }
    return rank0_ ? whole : whole.clone().view(param.shape());
  }

  bool keeps(const ModelParam& param) const {
    return param.is_sharded() || !request_.keeps || request_.keeps(param.leaf);
  }

  static at::Tensor without_values(
      const at::TensorOptions& options,
      const ModelParam& param) {
    return at::empty(param.shape(), options.device(at::kMeta));
  }

  /// Writes this rank's part of the parameter's state into `whole`, which is
  /// laid out as the leaf is. Parts from rank 0 come with scatter_parts().
  void fill(
      const ModelParam& param,
      const std::string& name,
      const StateValue& value,
      const at::Tensor& whole) {
    const at::Tensor part = part_of(param, whole);
    if (rank0_) {
      rank0_->add_part(param, name, part);
    } else if (value.is_tensor()) {
      part.copy_(part_of_whole(param, value.tensor()));
    } else {
      part.copy_(incoming_.take(param, value.sharded()));
    }
  }

  const LoadRequest& request_;
  const ModelParams model_;
  const Group group_; // the group that rank 0 is of; none in a process alone
  std::optional<Rank0OptimSource> rank0_; // with LoadFrom::Rank0
  std::optional<OptimTensors> tensors_;
  StateDict skeleton_;
  const StateDict* osd_ = nullptr; // request_.osd or skeleton_
  std::vector<WantedLeaf> leaves_;
  std::optional<StateList> param_groups_;
  ShardedSources incoming_;
};

} // namespace

StateDict load_optim_state(
    torch::nn::Module& model,
    const LoadRequest& request) {
  return Loader(model, request).load();
}

} // namespace tessera::transfer
