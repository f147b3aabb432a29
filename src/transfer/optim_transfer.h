// Optimizer state from one rank's optimizer to names of the model, and back.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "transfer/model_params.h"
#include "transfer/optim_tensors.h"

namespace tessera::transfer {

using TensorGroups = std::vector<std::vector<at::Tensor>>;

/// True for a value that is cut and joined as its parameter is. `like`: the
/// shape that such a value has. Where that has no dimensions, nothing but the
/// name tells it from a count of steps.
bool is_elementwise(
    std::string_view name,
    const StateValue& value,
    at::IntArrayRef like);

/// Throws c10::ValueError unless `osd` has the form of an optimizer's state
/// dict: "state" with a dict for each key, and, if there are any,
/// "param_groups" with their "params".
void check_form(const StateDict& osd, std::string_view call);

/// An element of "params" as a key of "state".
StateKey key_of(const StateValue& param);

struct SaveRequest {
  std::string_view call;
  const StateDict& osd; // this rank's
  const TensorGroups& tensors; // this rank's optimizer's
  bool is_full = true; // else sharded
  bool rank0_only = false;
  bool offload_to_cpu = true;
  std::optional<Group> group = std::nullopt; // whose rank 0
};

/// Names as keys. On other ranks than 0 empty, if that is asked for.
/// Collective.
StateDict save_optim_state(
    torch::nn::Module& model,
    const SaveRequest& request);

/// Where the values to load are.
enum class LoadFrom {
  Everywhere, // full tensors on every rank; not collective
  EverywhereTogether, // the same, but ranks make sure that they have the same
  Rank0, // full tensors on rank 0
  Shards, // sharded tensors
};

struct LoadRequest {
  std::string_view call;
  const StateDict& osd; // names as keys; what rank 0 has, if it is from there
  const TensorGroups& tensors; // this rank's optimizer's
  LoadFrom from = LoadFrom::Everywhere;
  bool keeps_names = false; // as keys
  std::optional<Group> group = std::nullopt; // whose rank 0
  /// Whether this rank's optimizer keeps the state of a parameter that is not
  /// sharded; if not, a tensor without values stands for it. Empty: of all.
  std::function<bool(const at::Tensor& param)> keeps = {};
};

/// What this rank's optimizer loads.
StateDict load_optim_state(
    torch::nn::Module& model,
    const LoadRequest& request);

/// What optimizers had: each, called, gives it back.
using Snapshots = std::vector<std::function<void()>>;

/// Loads each optimizer's dictionary; if one refuses its own, on any rank, all
/// of them get back what they had. Returns what that was. Collective.
Snapshots load_together(
    const std::vector<Group>& groups,
    std::string_view call,
    const OptimizerRefs& optimizers,
    const std::vector<StateDict>& dicts);

/// What load_together() does then.
void load_back(const Snapshots& before);

} // namespace tessera::transfer
