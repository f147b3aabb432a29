// Sharded tensors of any layout, as sources for a model's parameters.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/engine/sharded_tensor.h>

#include <ATen/core/Tensor.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "transfer/model_params.h"

namespace tessera::transfer {

/// Decides which tensors must be put together by all ranks, because some rank
/// needs elements that it does not have; ranks take the other tensors from
/// their own memory. All ranks add the same tensors in the same order, then
/// agree, then take them in the same order.
class ShardedSources {
 public:
  /// `tensor` must outlive the sources. `is_needed`: this rank needs the
  /// tensor; ranks may differ.
  void add(
      const ModelParam& param,
      const ShardedTensor& tensor,
      bool is_needed = true);
  /// Throws on all ranks if a tensor would have to be put together by ranks
  /// that are not in the parameter's group; for parameters that are not
  /// sharded, the first group. Collective over the groups; without any, over
  /// the tensors' own.
  void agree(const std::vector<Group>& groups, std::string_view call);
  /// This rank's part of the parameter, flattened; may share the tensor's
  /// memory. Undefined if this rank does not need the tensor and ranks need not
  /// put it together. Collective if they must.
  at::Tensor take(const ModelParam& param, const ShardedTensor& tensor) const;
  /// Whether take() would return the values of `memory`, which has one
  /// dimension, from `memory` itself. Not collective.
  bool is_in(
      const ModelParam& param,
      const ShardedTensor& tensor,
      const at::Tensor& memory) const;

 private:
  struct Item {
    const ModelParam* param;
    const ShardedTensor* tensor;
    bool is_needed;

    bool lies_here() const;
  };
  void agree_by_tensor();

  std::vector<Item> items_;
  std::set<const ShardedTensor*> moves_;
  std::set<const ShardedTensor*> unneeded_; // by this rank
};

/// This rank's part of a parameter, flattened, out of a full tensor.
at::Tensor part_of_whole(const ModelParam& param, const at::Tensor& whole);

} // namespace tessera::transfer
