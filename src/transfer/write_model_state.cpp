#include "transfer/write_model_state.h"

#include <tessera/comm/agree.h>
#include <tessera/engine/parameters.h>
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unordered_map>
#include <unordered_set>

#include "base/byte_vector.h"
#include "comm/group/all_or_none.h"
#include "engine/list_parameters.h"
#include "engine/start.h"
#include "state/describe.h"
#include "transfer/incompatible_keys.h"
#include "transfer/model_params.h"
#include "transfer/param_parts.h"
#include "transfer/sharded_sources.h"
#include "transfer/state_entries.h"

namespace tessera::transfer {
namespace {

/// A value and where it goes: a parameter, or a buffer seen as one.
struct Target {
  std::string name;
  ModelParam to;
  bool is_buffer = false;
  const StateValue* value = nullptr;

  /// `part`: this rank's part of the value, flattened.
  void write(const at::Tensor& part) const {
    if (to.is_sharded()) {
      to.own_part().copy_(part);
    } else {
      to.face.detach().copy_(part.view(to.shape()));
    }
  }
};

/// `dict` with sharded tensors of no pieces in place of tensors: what the other
/// ranks need to know about `dict` before its values come.
StateDict skeleton_of(const StateDict& dict, const Group& group) {
  StateDict skeleton;
  for (const auto& [key, value] : dict) {
    if (value.is_tensor() && value.tensor().defined()) {
      const at::Tensor& tensor = value.tensor();
      skeleton.set(
          key,
          ShardedTensor(tensor.sizes().vec(), tensor.scalar_type(), {}, group));
    } else {
      skeleton.set(key, value);
    }
  }
  return skeleton;
}

class Writer {
 public:
  Writer(torch::nn::Module& module, const WriteRequest& request)
      : module_(module), request_(request), params_(module, request.call) {
    if (request.from_rank0) {
      group_ = params_.root_group();
    }
  }

  IncompatibleKeys write() {
    IncompatibleKeys keys;
    receives_ = group_.valid() && group_.rank() != 0;
    if (group_.valid()) {
      comm::all_or_none({group_}, request_.call, [this] { check_source(); });
      skeleton_ = broadcast_skeleton();
    }
    const auto groups =
        group_.valid() ? std::vector<Group>{group_} : params_.groups();
    comm::all_or_none(groups, request_.call, [&] {
      keys = plan(group_.valid() ? skeleton_ : request_.dict);
    });
    comm::for_each_group(groups, [this](const Group& group) {
      agree(group, request_.call, lines());
    });
    if (!group_.valid()) {
      add_incoming();
      incoming_.agree(params_.groups(), request_.call);
    }
    move();
    return keys;
  }

 private:
  void check_source() const {
    for (const ModelParam& param : params_.all()) {
      if (param.is_sharded()) {
        check_root(param, group_.global_ranks().front(), request_.call);
      }
    }
    for (const auto& [key, value] : request_.dict) {
      if (!receives_ && !value.is_tensor()) {
        raise<c10::ValueError>(
            {.call = request_.call, .parameter = key.text()},
            fmt::format("a {}; rank 0 must have full tensors.", value.kind()));
      }
    }
  }

  StateDict broadcast_skeleton() const {
    Bytes bytes;
    if (!receives_) {
      bytes = state_dict_to_bytes(skeleton_of(request_.dict, group_));
    }
    return state_dict_from_bytes(
        group_.broadcast_bytes(bytes, 0, "model state"), group_);
  }

  IncompatibleKeys plan(const StateDict& dict) {
    IncompatibleKeys keys;
    std::vector<std::string> expected;
    std::unordered_set<std::string> known;
    for (Target& target : all_targets()) {
      expected.push_back(target.name);
      known.insert(target.name);
      target.value = dict.find(target.name);
      if (target.value != nullptr) {
        check(target);
        targets_.push_back(std::move(target));
      } else if (!request_.ignore_frozen || !is_frozen(target)) {
        keys.missing.push_back(target.name);
      }
    }
    for (const auto& [key, value] : dict) {
      if (key.is_id() || !known.contains(key.name())) {
        keys.unexpected.push_back(key.text());
      }
    }
    if (request_.strict) {
      refuse_incompatible(request_.call, keys, expected);
    }
    return keys;
  }

  std::vector<Target> all_targets() const {
    std::vector<Target> result;
    const auto add_plain =
        [&](const std::string& name, const at::Tensor& one, bool is_buffer) {
          result.push_back(
              {name, {name, one, one, nullptr, {}}, is_buffer, nullptr});
        };
    if (request_.is_local) {
      for (const auto& [name, tensor] : engine::list_parameters(module_)) {
        add_plain(name, tensor, false);
      }
      for (const StateEntry& entry : state_entries(module_)) {
        if (entry.is_buffer) {
          add_plain(entry.name, entry.tensor, true);
        }
      }
      return result;
    }
    std::unordered_map<const c10::TensorImpl*, const ModelParam*> by_face;
    for (const ModelParam& param : params_.all()) {
      by_face.emplace(param.face.unsafeGetTensorImpl(), &param);
    }
    for (const StateEntry& entry : state_entries(module_)) {
      const auto found = by_face.find(entry.tensor.unsafeGetTensorImpl());
      if (found == by_face.end()) {
        add_plain(entry.name, entry.tensor, true);
      } else {
        result.push_back({entry.name, *found->second, false, nullptr});
      }
    }
    return result;
  }

  static bool is_frozen(const Target& target) {
    return !target.is_buffer && !target.to.leaf.requires_grad();
  }

  void check(const Target& target) const {
    const StateValue& value = *target.value;
    const auto refuse = [&](const std::string& what) {
      raise<c10::ValueError>(
          {.call = request_.call, .parameter = target.name}, what);
    };
    if (!value.is_sharded() &&
        !(value.is_tensor() && value.tensor().defined())) {
      refuse(fmt::format(
          "the state dict has {}, expected a tensor.", state::describe(value)));
    }
    const std::vector<int64_t> sizes = value.is_sharded()
        ? value.sharded().sizes()
        : value.tensor().sizes().vec();
    if (sizes != target.to.shape()) {
      refuse(fmt::format(
          "the state dict has the shape [{}], the model [{}].",
          fmt::join(sizes, ", "),
          fmt::join(target.to.shape(), ", ")));
    }
  }

  /// Lines that must be the same on all ranks.
  std::vector<std::string> lines() const {
    std::vector<std::string> result;
    for (const Target& target : targets_) {
      if (target.to.is_sharded() || target.value->is_sharded()) {
        result.push_back(
            target.name +
            (target.value->is_sharded()
                 ? ": sharded"
                 : fmt::format(
                       ": full, with the digest {:016x}",
                       engine::digest_of(target.value->tensor()))));
      }
    }
    return result;
  }

  void add_incoming() {
    for (const Target& target : targets_) {
      if (target.value->is_sharded()) {
        incoming_.add(target.to, target.value->sharded());
      }
    }
  }

  void move() {
    at::NoGradGuard no_grad;
    std::unordered_set<const c10::TensorImpl*> written; // tied parameters once
    std::vector<const Target*> once;
    for (const Target& target : targets_) {
      if (written.insert(target.to.face.unsafeGetTensorImpl()).second) {
        once.push_back(&target);
      }
    }
    if (group_.valid()) {
      move_from_rank0(once);
      return;
    }
    for (const Target* target : once) {
      target->write(
          target->value->is_sharded()
              ? incoming_.take(target->to, target->value->sharded())
              : part_of_whole(target->to, target->value->tensor()));
    }
  }

  void move_from_rank0(const std::vector<const Target*>& targets) {
    std::vector<ParamPart> parts;
    std::vector<at::Tensor> sources;
    for (const Target* target : targets) {
      const ShardedTensor& like = target->value->sharded();
      const at::Tensor source = receives_
          ? at::Tensor()
          : request_.dict.at(target->name).tensor().detach();
      if (target->to.is_sharded()) {
        const at::Tensor own = target->to.own_part();
        parts.push_back(
            {&target->to,
             at::empty(own.sizes(), own.options().dtype(like.dtype()))});
        sources.push_back(source);
      } else {
        const at::Tensor whole = receives_
            ? at::empty(like.sizes(), at::TensorOptions().dtype(like.dtype()))
            : source.cpu().contiguous();
        group_.broadcast(whole, 0, target->name);
        target->write(whole.view({-1}));
      }
    }
    if (parts.empty()) {
      return;
    }
    scatter(sources, parts, group_.global_ranks().front());
    for (const ParamPart& part : parts) {
      part.param->own_part().copy_(part.mine);
    }
  }

  torch::nn::Module& module_;
  const WriteRequest& request_;
  const ModelParams params_;
  Group group_; // with from_rank0: the group that rank 0 is of
  bool receives_ = false;
  StateDict skeleton_;
  std::vector<Target> targets_;
  ShardedSources incoming_;
};

} // namespace

IncompatibleKeys write_model_state(
    torch::nn::Module& module,
    const WriteRequest& request) {
  return Writer(module, request).write();
}

} // namespace tessera::transfer
