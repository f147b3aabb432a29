// The gradients of the parameters of one dtype in a unit.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string_view>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/layout.h"
#include "engine/unit_options.h"

namespace tessera::engine {

/// Full gradients are copied into one flat buffer, wait there, and are averaged
/// into a part for each rank. In hybrid sharding that is the average over one
/// copy of the model; a second reduction averages the part over the copies.
class BundleGradients {
 public:
  /// `full` tells where full parameters are, `shard` what the average becomes.
  BundleGradients(
      const Layout& layout,
      const at::Tensor& shard,
      const at::TensorOptions& full,
      const Groups& groups,
      const UnitOptions& options,
      BufferPool& pool);

  /// The dtype in which gradients are averaged.
  at::ScalarType reduce_dtype() const;
  /// Adds full gradients, by index in the layout, to those that wait; an
  /// undefined one counts as zeros, since a peer may have one.
  void add(
      const std::vector<at::Tensor>& gradients,
      const std::vector<bool>& trainable);
  /// Gradients wait for a reduction or are being reduced, or, if that is asked
  /// for, wait for the all-reduce that an earlier reduction left out.
  bool has_waiting(bool all_reduce) const {
    return gradients_.defined() || (all_reduce && partial_.defined());
  }
  /// Averages the gradients that wait. Without `all_reduce` only over the
  /// shard group; the result waits for the next one that has it.
  void start_reduction(bool all_reduce, std::string_view label);
  bool is_reducing() const {
    return reduced_.defined();
  }
  /// Waits for the average over the shard group and starts the one over the
  /// copies. False: there is none, or it was started at once.
  bool go_on_to_copies(std::string_view label);
  /// The average as (shard_numel) in the shard's dtype and place; undefined
  /// where it waits for an all-reduce. `used` says by index which parameters
  /// had a gradient.
  struct Reduced {
    at::Tensor mean;
    std::vector<bool> used;
  };
  Reduced finish_reduction(std::string_view label);
  void drop_reduction() noexcept;

  /// Waits for a reduction that is under way, and forgets how it ended.
  void settle() noexcept;

  /// Bytes of gradients that wait or are being reduced.
  size_t bytes_now() const;

 private:
  bool start_over_copies(std::string_view label);

  // Constant after construction.
  const Layout layout_;
  const at::Tensor shard_;
  const at::TensorOptions full_options_;
  const Groups groups_;
  const UnitOptions options_;
  BufferPool& pool_;

  at::Tensor gradients_; // (travel_numel) in the reduce dtype
  at::Tensor reduced_; // (shard_numel)
  at::Tensor partial_; // (shard_numel): averaged over the shard group only
  std::vector<bool> used_; // by index: got a gradient
  bool all_reduces_ = true;
  Work reduction_;
};

} // namespace tessera::engine
