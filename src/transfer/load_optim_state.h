// A state dict under the names of the model as one rank's optimizer loads it.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string_view>

#include "transfer/optim_tensors.h"

namespace tessera::transfer {

/// Where the values to load are.
enum class LoadFrom {
  Everywhere, // full tensors on every rank; not collective
  EverywhereTogether, // the same; ranks check that their values are equal
  Rank0, // full tensors on rank 0
  Shards, // sharded tensors
};

struct LoadRequest {
  std::string_view call;
  const StateDict& osd; // names as keys; with LoadFrom::Rank0 only rank 0's
  const TensorGroups& tensors; // the parameters of this rank's optimizer
  LoadFrom from = LoadFrom::Everywhere;
  bool keeps_names = false; // as keys of the result, in place of numbers
  std::optional<Group> group = std::nullopt; // the group that rank 0 is of
  /// Whether this rank's optimizer keeps the state of a parameter that is not
  /// sharded; if not, a tensor without values stands for that state. Empty: the
  /// optimizer keeps the state of all parameters.
  std::function<bool(const at::Tensor& param)> keeps = {};
  /// The tensor of this name that the optimizer has for a parameter, undefined
  /// for none. Values that lie in that tensor already are not copied.
  std::function<at::Tensor(const at::Tensor& param, const StateKey& name)>
      current = {};
};

/// The state dict for this rank's optimizer to load. Collective, unless the
/// values come from LoadFrom::Everywhere.
StateDict load_optim_state(
    torch::nn::Module& model,
    const LoadRequest& request);

} // namespace tessera::transfer
