// The tensors of an optimizer, and what each holds of a model.
#pragma once

#include <tessera/state/state_dict.h>
#include <tessera/transfer/optim_state.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <string_view>
#include <unordered_map>
#include <vector>

#include "transfer/model_params.h"

namespace tessera::transfer {

/// The parameters of an optimizer, by group.
using TensorGroups = std::vector<std::vector<at::Tensor>>;

/// One tensor of an optimizer.
struct OptimTensor {
  int64_t id = 0; // counted through all groups
  at::Tensor tensor;
  /// The parameter of the model that the tensor holds, or all parameters that
  /// make up a flat one.
  std::vector<const ModelParam*> members;

  bool is_sharded() const {
    return members.front()->is_sharded();
  }
};

/// All tensors of an optimizer, by group, in the optimizer's order.
class OptimTensors {
 public:
  /// Throws c10::ValueError for a tensor that is not of the model, or comes
  /// twice.
  OptimTensors(
      const ModelParams& model,
      const TensorGroups& groups,
      std::string_view call);

  const std::vector<std::vector<OptimTensor>>& groups() const {
    return groups_;
  }
  /// The tensor that holds this parameter, or null.
  const OptimTensor* holder_of(const ModelParam& param) const;

 private:
  std::vector<std::vector<OptimTensor>> groups_;
  std::unordered_map<const c10::TensorImpl*, std::pair<size_t, size_t>>
      by_leaf_;
};

TensorGroups tensors_of(const torch::optim::Optimizer& optim);

} // namespace tessera::transfer
