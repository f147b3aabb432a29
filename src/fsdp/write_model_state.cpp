#include "fsdp/write_model_state.h"

#include <tessera/comm/agree.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unordered_map>
#include <unordered_set>

#include "fsdp/incoming.h"
#include "fsdp/model_params.h"
#include "state/describe.h"
#include "state/nearest.h"

namespace tessera::fsdp {
namespace {

/// One value and where it goes.
struct Target {
  std::string name;
  const ModelParam* param = nullptr; // if it is sharded
  at::Tensor tensor; // else
  const StateValue* value = nullptr;

  std::vector<int64_t> shape() const {
    return param != nullptr ? param->shape() : tensor.sizes().vec();
  }
};

class Writer {
 public:
  Writer(torch::nn::Module& module, const WriteRequest& request)
      : module_(module), request_(request), params_(module, request.call) {
    if (request.from_rank0) {
      group_ = !params_.groups().empty() ? params_.groups().front()
          : is_initialized()             ? world()
                                         : Group();
    }
  }

  IncompatibleKeys write() {
    std::optional<std::string> problem;
    IncompatibleKeys keys;
    receives_ = group_.valid() && group_.rank() != 0;
    if (group_.valid()) {
      problem = broadcast_skeleton();
      fail_together(group_, request_.call, problem);
    }
    try {
      keys = plan(group_.valid() ? skeleton_ : request_.dict);
    } catch (const c10::Error& error) {
      if (params_.groups().empty()) {
        throw;
      }
      problem = error.what_without_backtrace();
    }
    for (const Group& group : params_.groups()) {
      fail_together(group, request_.call, problem);
      agree(group, request_.call, lines());
    }
    if (!group_.valid()) {
      add_incoming();
      incoming_.agree(params_.groups(), request_.call);
    }
    move();
    return keys;
  }

 private:
  /// Nothing, or why rank 0's dictionary cannot be sent.
  std::optional<std::string> broadcast_skeleton() {
    std::optional<std::string> problem;
    Bytes bytes;
    if (!receives_) {
      for (const auto& [key, value] : request_.dict) {
        if (!value.is_tensor()) {
          problem = fmt::format(
              "\"{}\" is a {}; rank 0 must have full tensors.",
              key.text(),
              value.kind());
        }
      }
      bytes =
          to_bytes(problem ? StateDict() : skeleton_of(request_.dict, group_));
    }
    skeleton_ = state_from_bytes(
        group_.broadcast_bytes(bytes, 0, "model state"), group_);
    return problem;
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
    std::vector<std::string> given;
    for (const auto& [key, value] : dict) {
      given.push_back(key.text());
      if (key.is_id() || !known.contains(key.name())) {
        keys.unexpected.push_back(key.text());
      }
    }
    if (request_.strict) {
      refuse_incompatible(request_.call, keys, expected, given);
    }
    return keys;
  }

  std::vector<Target> all_targets() const {
    std::vector<Target> result;
    if (request_.is_local) {
      for (const auto& [name, tensor] : named_parameters(module_)) {
        result.push_back({name, nullptr, tensor, nullptr});
      }
      for (const auto& [name, tensor] : named_buffers(module_)) {
        result.push_back({name, nullptr, tensor, nullptr});
      }
      return result;
    }
    std::unordered_map<const c10::TensorImpl*, const ModelParam*> by_face;
    for (const ModelParam& param : params_.all()) {
      if (param.is_sharded()) {
        by_face.emplace(param.face.unsafeGetTensorImpl(), &param);
      }
    }
    for (StateEntry& entry : state_entries(module_)) {
      const auto found = by_face.find(entry.tensor.unsafeGetTensorImpl());
      result.push_back(
          {std::move(entry.name),
           found == by_face.end() ? nullptr : found->second,
           entry.tensor,
           nullptr});
    }
    return result;
  }

  static bool is_frozen(const Target& target) {
    return target.param != nullptr ? !target.param->leaf.requires_grad()
                                   : !target.tensor.requires_grad();
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
    if (sizes != target.shape()) {
      refuse(fmt::format(
          "the state dict has the shape [{}], the model [{}].",
          fmt::join(sizes, ", "),
          fmt::join(target.shape(), ", ")));
    }
    if (target.param == nullptr && value.is_sharded() && !group_.valid() &&
        value.sharded().local_numel() != value.sharded().numel()) {
      refuse(
          "the state dict has a part of it on this rank, but it is not sharded here. Use a full state dict.");
    }
  }

  /// What must be the same on all ranks.
  std::vector<std::string> lines() const {
    std::vector<std::string> result;
    for (const Target& target : targets_) {
      if (target.param != nullptr) {
        result.push_back(
            target.name +
            (target.value->is_sharded() ? ": sharded" : ": full"));
      }
    }
    return result;
  }

  void add_incoming() {
    for (const Target& target : targets_) {
      if (target.param != nullptr && target.value->is_sharded()) {
        incoming_.add(*target.param, target.value->sharded());
      }
    }
  }

  void move() {
    at::NoGradGuard no_grad;
    std::unordered_set<const c10::TensorImpl*> written; // tied ones once
    for (const Target& target : targets_) {
      if (!written.insert(target.tensor.unsafeGetTensorImpl()).second) {
        continue;
      }
      if (group_.valid()) {
        move_from_rank0(target);
      } else if (target.param == nullptr) {
        at::Tensor to = target.tensor.detach();
        to.copy_(whole_of(*target.value));
      } else {
        const at::Tensor part = target.value->is_sharded()
            ? incoming_.take(*target.param, target.value->sharded())
            : part_of_whole(*target.param, target.value->tensor());
        target.param->own_part().copy_(part);
      }
    }
  }

  static at::Tensor whole_of(const StateValue& value) {
    if (value.is_tensor()) {
      return value.tensor().detach();
    }
    return value.sharded().pieces().empty() // of no elements
        ? at::empty(
              value.sharded().sizes(),
              at::TensorOptions().dtype(value.sharded().dtype()))
        : value.sharded().pieces().front().tensor.detach();
  }

  void move_from_rank0(const Target& target) {
    const ShardedTensor& like = target.value->sharded();
    const at::Tensor source = receives_
        ? at::Tensor()
        : request_.dict.at(target.name).tensor().detach();
    if (target.param == nullptr) {
      const at::Tensor whole = receives_
          ? at::empty(like.sizes(), at::TensorOptions().dtype(like.dtype()))
          : source.cpu().contiguous();
      group_.broadcast(whole, 0, target.name);
      at::Tensor to = target.tensor.detach();
      to.copy_(whole);
      return;
    }
    const at::Tensor own = target.param->own_part();
    const at::Tensor part =
        at::empty(own.sizes(), own.options().dtype(like.dtype()));
    target.param->scatter(
        source, part, group_.global_ranks().front(), target.name);
    own.copy_(part);
  }

  torch::nn::Module& module_;
  const WriteRequest& request_;
  const ModelParams params_;
  Group group_; // of from_rank0
  bool receives_ = false;
  StateDict skeleton_;
  std::vector<Target> targets_;
  Incoming incoming_;
};

} // namespace

void refuse_incompatible(
    std::string_view call,
    const IncompatibleKeys& keys,
    const std::vector<std::string>& expected,
    const std::vector<std::string>& given) {
  if (keys.missing.empty() && keys.unexpected.empty()) {
    return;
  }
  std::string text = "the state dict does not fit the model.";
  for (const std::string& name : keys.missing) {
    text += fmt::format(
        "\n  missing \"{}\".{}", name, state::did_you_mean(name, given));
  }
  for (const std::string& name : keys.unexpected) {
    text += fmt::format(
        "\n  unexpected \"{}\".{}", name, state::did_you_mean(name, expected));
  }
  raise<c10::ValueError>(
      {.call = call}, text + "\nCorrect the names, or load without strict.");
}

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

IncompatibleKeys write_model_state(
    torch::nn::Module& module,
    const WriteRequest& request) {
  return Writer(module, request).write();
}

} // namespace tessera::fsdp
