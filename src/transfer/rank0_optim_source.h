// Optimizer state that only rank 0 has.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include "transfer/model_params.h"
#include "transfer/param_parts.h"

namespace tessera::transfer {

/// Sends the state dict that rank 0 of a group has to the other ranks: its
/// skeleton first, which says what there is, then the values as ranks need
/// them.
class Rank0OptimSource {
 public:
  /// All arguments but `group` must outlive the source; ranks other than 0 may
  /// pass any `osd`.
  Rank0OptimSource(
      const ModelParams& model,
      const StateDict& osd,
      const Group& group,
      std::string_view call)
      : model_(model), osd_(osd), group_(group), call_(call) {}

  bool receives() const {
    return group_.rank() != 0;
  }
  /// Throws c10::ValueError if rank 0 cannot fill a parameter of the model.
  void check_reach() const;
  /// On rank 0: throws c10::ValueError for a sharded tensor in its dictionary.
  void check_values() const;
  /// Rank 0's dictionary with sharded tensors of no pieces in place of large
  /// tensors. Collective.
  StateDict broadcast_skeleton() const;
  /// Rank 0's tensor for a state of a parameter, on every rank; `like` is that
  /// state in the skeleton. Collective.
  at::Tensor broadcast_whole(
      const std::string& param,
      const std::string& name,
      const ShardedTensor& like) const;
  /// Asks for this rank's part of a state, which scatter_parts() fills. All
  /// ranks ask for the same parts in the same order.
  void add_part(
      const ModelParam& param,
      const std::string& name,
      const at::Tensor& part);
  /// Fills the parts that were added. Collective.
  void scatter_parts() const;

 private:
  at::Tensor tensor_of(const std::string& param, const std::string& name) const;

  const ModelParams& model_;
  const StateDict& osd_;
  const Group group_;
  const std::string_view call_;
  std::vector<ParamPart> parts_;
  std::vector<at::Tensor> sources_; // of the parts; undefined on receivers
};

} // namespace tessera::transfer
