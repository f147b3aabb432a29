#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>
#include <tessera/state/state_dict.h>
#include <tessera/transfer/model_state.h>

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <vector>

namespace tessera {

/// As in Python's torch.distributed.checkpoint.state_dict.
struct TESSERA_API StateDictOptions {
  /// Full tensors instead of sharded ones: on all ranks, or with cpu_offload on
  /// rank 0 only, while the other ranks get an empty dictionary.
  TORCH_ARG(bool, full_state_dict) = false;
  /// Getting: tensors are in host memory. Setting takes tensors from any
  /// device.
  TORCH_ARG(bool, cpu_offload) = false;
  /// Leave out parameters that do not require gradients; setting: they may be
  /// missing.
  TORCH_ARG(bool, ignore_frozen_params) = false;
  /// Getting from `submodules`: keep their prefixes in names.
  TORCH_ARG(bool, keep_submodule_prefixes) = true;
  /// Setting: throw for missing and unexpected keys.
  TORCH_ARG(bool, strict) = true;
  /// Setting: only rank 0 passes a (full) dictionary. Needs full_state_dict.
  TORCH_ARG(bool, broadcast_from_rank0) = false;
  /// Optimizer state on one level: "state.fc.weight.exp_avg",
  /// "param_groups.fc.weight.lr".
  TORCH_ARG(bool, flatten_optimizer_state_dict) = false;
};

/// References, as a braced list makes them: {optimizer}.
using OptimizerRefs =
    std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

/// State under the names of the unsharded model, for plain, data-parallel and
/// sharded modules alike; ignores state_dict_type. Getting changes neither
/// parameters nor gradients; an optimizer without state gets the one that a
/// step with zero gradients and learning rate 0 leaves. Values that are not
/// gathered share memory with model and optimizer. State that ranks share
/// (ZeroRedundancyOptimizer) is sharded, unless full_state_dict is set. With
/// `submodules` only their state. Collective if something is sharded.
///
/// Throws c10::Error for an optimizer without state while parameters
/// have gradients, and c10::ValueError for options that exclude each other.
TESSERA_API StateDict get_model_state_dict(
    ModuleRef model,
    const StateDictOptions& options = {},
    const ModuleRefs& submodules = {});
TESSERA_API StateDict get_optimizer_state_dict(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    const StateDictOptions& options = {},
    const ModuleRefs& submodules = {});

/// Both, as get_state_dict() returns them.
struct TESSERA_API ModelAndOptimizerState {
  StateDict model; // of get_model_state_dict()
  StateDict optimizer; // of get_optimizer_state_dict()
};

/// get_model_state_dict() and get_optimizer_state_dict() in one. Collective
/// where something is sharded.
TESSERA_API ModelAndOptimizerState get_state_dict(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    const StateDictOptions& options = {},
    const ModuleRefs& submodules = {});

/// Writes state that the calls above returned, for this or another sharding.
/// Everything is checked on all ranks first; after an error model and
/// optimizers are as they were. With `strict` all missing and unexpected keys
/// are named in one error, with the nearest name for each. Without `strict`,
/// those of a model are returned and left alone; state that belongs to none of
/// the optimizers' parameters is ignored, and their parameters may have no
/// state. (A trainable parameter that never had a gradient has no state: saved
/// so, it needs strict(false).)
///
/// All ranks must pass the same state: names, shapes, kinds and options are
/// compared, the values of full tensors are not. Throws c10::ValueError on all
/// ranks if something does not fit, DisagreementError if ranks differ, and
/// c10::Error for an empty dictionary if the model or the optimizers have
/// state.
TESSERA_API IncompatibleKeys set_model_state_dict(
    ModuleRef model,
    const StateDict& model_state_dict,
    const StateDictOptions& options = {});
TESSERA_API void set_optimizer_state_dict(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    const StateDict& optim_state_dict,
    const StateDictOptions& options = {});
TESSERA_API IncompatibleKeys set_state_dict(
    ModuleRef model,
    const OptimizerRefs& optimizers,
    const ModelAndOptimizerState& state,
    const StateDictOptions& options = {});

} // namespace tessera
