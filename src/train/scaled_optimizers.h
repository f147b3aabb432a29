// Optimizers between the unscaling of their gradients and the end of the
// iteration, and what the ranks know of the gradients.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace tessera::train {

/// An optimizer whose gradients were divided by the scale.
struct ScaledOptimizer {
  torch::optim::Optimizer* optimizer;
  bool has_stepped = false;
  /// A float32 scalar on the scale's device: 1 if a gradient is not finite. It
  /// speaks for this rank until the ranks have agreed, then for all.
  at::Tensor found_inf;
  bool is_agreed = false;

  /// Steps, unless a gradient is not finite. The ranks have agreed. Reads the
  /// device if the optimizer cannot.
  at::Tensor step();
  /// True if all its parameters are parameters of the model, or their shards.
  bool belongs_to(torch::nn::Module& model) const;
};

/// In the order in which they were unscaled, which is the same on all ranks.
class ScaledOptimizers {
 public:
  bool empty() const {
    return all_.empty();
  }
  /// Null if the optimizer was not unscaled.
  ScaledOptimizer* find(const torch::optim::Optimizer& optimizer);
  /// `found_inf` is that of this rank.
  void add(torch::optim::Optimizer& optimizer, at::Tensor found_inf);
  void clear() {
    all_.clear();
  }

  bool has_unstepped() const;
  bool is_agreed() const;
  /// One reduction for all optimizers that were added since the last one.
  /// Collective, unless is_agreed().
  void agree(const Group& group);
  /// The gradients of the model have this norm after they were unscaled. If
  /// `is_shared`, all ranks have the same norm, which they computed together.
  /// Reads no device.
  void note_norm(
      torch::nn::Module& model,
      const at::Tensor& norm,
      bool is_shared);

  /// Like ScaledOptimizer::found_inf, of all optimizers.
  at::Tensor found_inf(const at::Tensor& scale) const;

 private:
  std::vector<ScaledOptimizer> all_;
};

} // namespace tessera::train
