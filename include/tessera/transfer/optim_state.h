#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/module_ref.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <optional>
#include <vector>

namespace tessera {

/// [Note: optimizer state dicts]
///
/// An optimizer state dict (OSD) is what tessera::optim::state_dict() returns:
///
///   {"state": {key: {"exp_avg": ..., ...}}, "param_groups": [{"lr": ...,
///    "params": [keys]}]}
///
/// Optimizers number their parameters, and each rank has its own part of them,
/// so the numbers and tensors of one rank are meaningless for another model.
/// The functions here translate: to names of the unsharded model with full or
/// sharded tensors, which fit every wrapping, world size and order of
/// parameters, and back to the numbers and shards of one rank's optimizer. They
/// take and return what Python's FSDP functions of the same names do.
///
/// `model` may be sharded by FSDP or fully_shard, as a whole, in part, or not
/// at all; parameters that are not sharded pass through. State with the shape
/// of its parameter is cut and joined like the parameter; everything else
/// (step) must be the same on all ranks that have a part of the parameter.
/// Which collectives run depends only on the model, never on the order of an
/// optimizer's parameters; ranks first exchange what state they have, so that
/// errors come on all of them.

/// How an optimizer was built: parameters in order, in one group or several.
/// Deprecated in favour of the optimizer itself; using it warns, every time,
/// with a c10::DeprecationWarning.
class TESSERA_API OptimInput {
 public:
  /// As the optimizer's constructor takes them.
  OptimInput(std::vector<at::Tensor> params);
  OptimInput(const std::vector<torch::optim::OptimizerParamGroup>& groups);

  /// The parameters of each group.
  const std::vector<std::vector<at::Tensor>>& groups() const {
    return groups_;
  }

 private:
  std::vector<std::vector<at::Tensor>> groups_;
};

/// Options of full_optim_state_dict().
struct TESSERA_API FullOptimStateOptions {
  /// Deprecated: what the optimizer was built from.
  TORCH_ARG(std::optional<OptimInput>, optim_input) = std::nullopt;
  /// Only rank 0 gets the state; the other ranks get an empty dictionary and
  /// need no memory for it.
  TORCH_ARG(bool, rank0_only) = true;
  /// Whose rank 0 that is; default: that of the model's first unit.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// Names as keys, full tensors in host memory. They are copies. Rank 0 needs
/// memory for the result and nothing besides. Collective.
TESSERA_API StateDict full_optim_state_dict(
    ModuleRef model,
    const torch::optim::Optimizer& optim,
    const FullOptimStateOptions& options = {});

/// Names as keys, ShardedTensor values that share memory with the optimizer
/// (clone() makes a snapshot). Tensors without dimensions and plain values stay
/// as they are. Moves no tensor between ranks. `group` exists for compatibility
/// with Python and is not needed. Collective.
TESSERA_API StateDict sharded_optim_state_dict(
    ModuleRef model,
    const torch::optim::Optimizer& optim,
    const std::optional<Group>& group = std::nullopt);

/// Options of the functions that turn a full dictionary into this rank's.
struct TESSERA_API LoadOptimStateOptions {
  /// Deprecated: what the optimizer was built from.
  TORCH_ARG(std::optional<OptimInput>, optim_input) = std::nullopt;
  /// Whose numbers to use, optim(optimizer); without it and optim_input, those
  /// of parameters(model). The optimizer must outlive the options.
  TORCH_ARG(
      std::optional<std::reference_wrapper<const torch::optim::Optimizer>>,
      optim) = std::nullopt;
  /// See FullOptimStateOptions::group; for scatter_full_optim_state_dict.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// Converts names and full tensors, which every rank must have, to what this
/// rank's optimizer loads. Parameters without state are left out; keys that are
/// not of the model stay as they are. Not collective: the ranks compare what
/// they passed at the end of the model's next backward, which throws
/// DisagreementError if their values differ.
///
/// A flat parameter takes the state of all its members: missing tensors become
/// zeros, but other values must exist and be equal. Throws c10::ValueError if
/// they are not, and for state names or shapes that do not fit.
TESSERA_API StateDict shard_full_optim_state_dict(
    const StateDict& full_optim_state_dict,
    ModuleRef model,
    const LoadOptimStateOptions& options = {});

/// The same from rank 0 of the group; what other ranks pass is ignored.
/// Collective.
TESSERA_API StateDict scatter_full_optim_state_dict(
    const std::optional<StateDict>& full_optim_state_dict,
    ModuleRef model,
    const LoadOptimStateOptions& options = {});

/// The same from sharded_optim_state_dict(), of any layout over the same ranks.
/// Collective.
TESSERA_API StateDict flatten_sharded_optim_state_dict(
    const StateDict& sharded_optim_state_dict,
    ModuleRef model,
    const torch::optim::Optimizer& optim);

/// What the keys of an OSD are.
enum class OptimStateKeyType {
  ParamName, // names of the unsharded model
  ParamId, // numbers in the optimizer's order
};

/// Changes the keys of an OSD between names and numbers, for a model that is
/// not sharded. Throws c10::ValueError if they are mixed. Not collective.
TESSERA_API StateDict rekey_optim_state_dict(
    const StateDict& optim_state_dict,
    OptimStateKeyType key_type,
    ModuleRef model,
    const LoadOptimStateOptions& options = {});

/// Options of optim_state_dict().
struct TESSERA_API OptimStateOptions {
  /// Used instead of the optimizer's current state; with numbers as keys, or
  /// names if it is a NamedOptimizer's. May lack "param_groups".
  TORCH_ARG(std::optional<StateDict>, optim_state_dict) = std::nullopt;
  /// Whose rank 0 rank0_only means; default: that of the model's first unit.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// Returns the state as the model's state_dict_type says: full or sharded, on
/// all ranks or on rank 0, in host memory or on its device. Collective.
TESSERA_API StateDict optim_state_dict(
    ModuleRef model,
    const torch::optim::Optimizer& optim,
    const OptimStateOptions& options = {});

/// Options of optim_state_dict_to_load().
struct TESSERA_API OptimStateToLoadOptions {
  /// Keep names as keys.
  TORCH_ARG(bool, is_named_optimizer) = false;
  /// Also load it into `optim`.
  TORCH_ARG(bool, load_directly) = false;
  /// See OptimStateOptions::group.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// Converts what optim_state_dict() returned, for this model or another one, to
/// what this rank's optimizer loads; `optim_state_dict` is left as it is. With
/// rank0_only in the model's state_dict_type, from rank 0's. Collective.
TESSERA_API StateDict optim_state_dict_to_load(
    ModuleRef model,
    torch::optim::Optimizer& optim,
    const StateDict& optim_state_dict,
    const OptimStateToLoadOptions& options = {});

} // namespace tessera
