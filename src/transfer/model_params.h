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
  /// What an optimizer has: its shard, a flat shard that it shares with others,
  /// or the parameter itself.
  at::Tensor leaf;
  std::shared_ptr<engine::Unit> unit; // none: not sharded
  engine::UnitParams::Place place; // in the unit

  bool is_sharded() const {
    return unit != nullptr;
  }
  /// Its leaf holds the whole unit.
  bool is_flat() const {
    return is_sharded() && unit->options().one_leaf;
  }
  std::vector<int64_t> shape() const;
  /// What this rank has of it; in its leaf, if that is flat.
  engine::Run run() const;
  engine::Cut cut() const;
  /// This rank's part of a tensor that is laid out as the leaf is, flattened.
  at::Tensor part_of(const at::Tensor& like_leaf) const;
  /// This rank's part of the parameter, flattened. Writes to it are noticed.
  at::Tensor own_part() const;
  /// A part of it, flattened, as a sharded tensor; shares its memory.
  ShardedTensor sharded(const at::Tensor& part) const;
  /// Of the unit; only if it is sharded.
  const engine::Layout& layout() const;
};

/// All of them, in the module's order, tied ones once under their first name.
class ModelParams {
 public:
  /// Throws c10::Error inside summon_full_params; `call` is for errors.
  ModelParams(torch::nn::Module& module, std::string_view call);

  const std::vector<ModelParam>& all() const {
    return params_;
  }
  /// Null if there is none of that name.
  const ModelParam* find(const std::string& name) const;
  /// What an optimizer's tensor holds of the model: one parameter, those of a
  /// flat one in its order, or nothing. Throws c10::Error if the module has
  /// only some of those.
  std::vector<const ModelParam*> held_by(const at::Tensor& leaf) const;
  /// Groups that units of the model are spread over, each once, in the order of
  /// the units.
  const std::vector<Group>& groups() const {
    return groups_;
  }
  /// Whose rank 0 has what only one rank has: the first of these, or the world;
  /// no group in a process alone.
  Group root_group() const;
  std::vector<std::string> names() const;

 private:
  std::vector<ModelParam> params_;
  std::unordered_map<std::string, size_t> by_name_;
  std::unordered_map<const c10::TensorImpl*, std::vector<size_t>> by_leaf_;
  std::vector<Group> groups_;
  std::string call_;
};

/// This rank's part of a sharded parameter, or of state of its shape,
/// flattened.
struct ParamPart {
  const ModelParam* param = nullptr;
  at::Tensor mine;
};

/// The wholes from every rank's parts, unit by unit: on `root`, a rank of the
/// world, and undefined elsewhere; without one, on all ranks. Parts come in the
/// same order on all ranks. `to_cpu`: the wholes end up in host memory.
/// Collective.
std::vector<at::Tensor> gather(
    const std::vector<ParamPart>& parts,
    std::optional<int> root,
    bool to_cpu);

/// Throws c10::ValueError if the parameter cannot be filled from `root`, a rank
/// of the world: it is not among those that it is spread over.
void check_root(const ModelParam& param, int root, std::string_view call);

/// Fills every rank's parts from `wholes`, which only `root` needs to have. See
/// check_root(). Collective.
void scatter(
    const std::vector<at::Tensor>& wholes,
    const std::vector<ParamPart>& parts,
    int root);

/// What a state dict has an entry for.
struct StateEntry {
  std::string name;
  at::Tensor tensor;
  bool is_buffer = false;
};

/// All of a module's, as Python's state_dict() orders and names them: tied ones
/// under every name.
std::vector<StateEntry> state_entries(const torch::nn::Module& module);

} // namespace tessera::transfer
