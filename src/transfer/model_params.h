// The parameters of a model as state dicts see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/exchange.h"
#include "engine/unit.h"

namespace tessera::transfer {

/// A parameter of a model, sharded or not.
struct ModelParam {
  std::string name; // in the model
  at::Tensor face; // as the module registered it
  /// The tensor that an optimizer steps: the parameter's shard, a flat shard
  /// that several parameters share, or the parameter itself.
  at::Tensor leaf;
  std::shared_ptr<engine::Unit> unit; // none: not sharded
  engine::UnitParams::Place place; // in the unit

  bool is_sharded() const {
    return unit != nullptr;
  }
  /// Whether the leaf holds the whole unit.
  bool is_flat() const {
    return is_sharded() && unit->options().one_leaf;
  }
  std::vector<int64_t> shape() const;
  /// This rank's elements of the parameter; positions are in the leaf if that
  /// is flat.
  engine::Run run() const;
  engine::Cut cut() const;
  /// This rank's part of a tensor that is laid out as the leaf is, flattened.
  at::Tensor part_of(const at::Tensor& like_leaf) const;
  /// This rank's part of the parameter, flattened. Writes to it are noticed.
  at::Tensor own_part() const;
  /// A part of the parameter, flattened, as a sharded tensor that shares the
  /// part's memory.
  ShardedTensor sharded(const at::Tensor& part) const;
  /// The layout of the unit; only for a sharded parameter.
  const engine::Layout& layout() const;
};

/// All parameters of a module, in the module's order. Tied parameters appear
/// once, under their first name.
class ModelParams {
 public:
  /// Throws c10::Error inside summon_full_params; `call` is for errors.
  ModelParams(torch::nn::Module& module, std::string_view call);

  const std::vector<ModelParam>& all() const {
    return params_;
  }
  /// Null if there is none of that name.
  const ModelParam* find(const std::string& name) const;
  /// The parameters that an optimizer's tensor holds: one, all that make up a
  /// flat parameter in their order, or none. Throws c10::Error if the module
  /// has only some parameters of a flat one.
  std::vector<const ModelParam*> held_by(const at::Tensor& leaf) const;
  /// The groups that units of the model are spread over, each once, in the
  /// order of the units.
  const std::vector<Group>& groups() const {
    return groups_;
  }
  /// The group whose rank 0 holds state that only one rank has: the first of
  /// groups(), or the world; no group in a process alone.
  Group root_group() const;
  std::vector<std::string> names() const;

 private:
  std::vector<ModelParam> params_;
  std::unordered_map<std::string, size_t> by_name_;
  std::unordered_map<const c10::TensorImpl*, std::vector<size_t>> by_leaf_;
  std::vector<Group> groups_;
  std::string call_;
};

} // namespace tessera::transfer
