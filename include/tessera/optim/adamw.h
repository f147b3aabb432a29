#pragma once

#include <tessera/api.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <tuple>
#include <vector>

namespace tessera::optim {

/// As Python's torch.optim.AdamW.
struct TESSERA_API AdamWOptions
    : torch::optim::OptimizerCloneableOptions<AdamWOptions> {
  AdamWOptions(double lr = 1e-3); // NOLINT: AdamW(parameters, 3e-4) is meant

  TORCH_ARG(double, lr) = 1e-3;
  typedef std::tuple<double, double> betas_t;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  /// Use the largest of the second moments so far.
  TORCH_ARG(bool, amsgrad) = false;
  /// Climb instead of descend.
  TORCH_ARG(bool, maximize) = false;

 public:
  double get_lr() const override;
  void set_lr(const double lr) override;
};

/// What AdamW keeps for a parameter, made when it first has a gradient.
struct TESSERA_API AdamWParamState
    : torch::optim::OptimizerCloneableParamState<AdamWParamState> {
  /// Steps made: a float32 scalar, as Python has it.
  TORCH_ARG(at::Tensor, step) = {};
  TORCH_ARG(at::Tensor, exp_avg) = {};
  TORCH_ARG(at::Tensor, exp_avg_sq) = {};
  TORCH_ARG(at::Tensor, max_exp_avg_sq) = {}; // only with amsgrad
};

/// AdamW on ATen's fused kernel: all parameters of a group in one call, each
/// element read and written once. LibTorch's schedulers drive it. Parameters
/// without a gradient are left alone; empty shards are fine.
class TESSERA_API AdamW : public torch::optim::Optimizer {
 public:
  explicit AdamW(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      AdamWOptions defaults = {});
  explicit AdamW(std::vector<at::Tensor> params, AdamWOptions defaults = {});

  /// Runs `closure` first, if there is one, with gradients enabled, and returns
  /// its loss. Not collective.
  at::Tensor step(LossClosure closure = nullptr) override;
};

} // namespace tessera::optim
