#include <tessera/optim/adam.h>
#include <tessera/optim/adamw.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <optional>
#include <utility>

#include "optim/option_fields.h"

namespace tessera::optim {
namespace {

using Kind = StateField::Kind;
constexpr StateField kAdamStep{"step", Kind::DeviceScalar};
constexpr StateField kExpAvg{"exp_avg", Kind::LikeParam};
constexpr StateField kExpAvgSq{"exp_avg_sq", Kind::LikeParam};
constexpr StateField kMaxExpAvgSq{
    "max_exp_avg_sq",
    Kind::LikeParam,
    /*is_required=*/false};

/// Both kernels have the same arguments. `found_inf` is that of skip_where().
template <class Options, class Kernel>
void run(
    const Options& options,
    Batch& batch,
    const at::Tensor& found_inf,
    Kernel kernel) {
  const auto steps = batch.state(kAdamStep);
  const auto exp_avgs = batch.state(kExpAvg);
  const auto exp_avg_sqs = batch.state(kExpAvgSq);
  const auto max_exp_avg_sqs =
      options.amsgrad() ? batch.state(kMaxExpAvgSq) : std::vector<at::Tensor>();
  const auto [beta1, beta2] = options.betas();
  at::_foreach_add_(steps, 1);
  std::optional<at::Tensor> skip;
  if (found_inf.defined()) {
    skip = found_inf.to(batch.params.front().device());
    // The kernel leaves out the rest of the step.
    at::_foreach_sub_(steps, std::vector<at::Tensor>(steps.size(), *skip));
  }
  const auto update = [&, beta1 = beta1, beta2 = beta2](const auto& lr) {
    kernel(
        batch.params,
        batch.gradients,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        steps,
        lr,
        beta1,
        beta2,
        options.weight_decay(),
        options.eps(),
        options.amsgrad(),
        options.maximize(),
        /*grad_scale=*/std::optional<at::Tensor>(),
        skip);
  };
  if (reads_lr_on_device(options, batch)) {
    update(options.lr_on_device());
  } else {
    update(options.lr());
  }
}

constexpr auto fused_adam = [](const auto&... arguments) {
  at::_fused_adam_(arguments...);
};
constexpr auto fused_adamw = [](const auto&... arguments) {
  at::_fused_adamw_(arguments...);
};

} // namespace

AdamOptions::AdamOptions(double lr) {
  this->lr(lr);
}

std::vector<OptionField> AdamOptions::fields() {
  return {
      {"lr", lr_, OptionRange::NotNegative},
      {"betas", betas_, OptionRange::Fraction},
      {"eps", eps_, OptionRange::NotNegative},
      {"weight_decay", weight_decay_, OptionRange::NotNegative},
      {"amsgrad", amsgrad_},
      {"maximize", maximize_},
      {"foreach", foreach_},
      {"capturable", capturable_},
      {"differentiable", not_differentiable()},
      {"fused", fused_},
      {"decoupled_weight_decay", decoupled_weight_decay_}};
}

Adam::Adam(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    AdamOptions defaults)
    : Optimizer(
          "Adam",
          param_groups,
          std::make_unique<AdamOptions>(std::move(defaults))) {}

Adam::Adam(std::vector<at::Tensor> params, AdamOptions defaults)
    : Adam(
          {torch::optim::OptimizerParamGroup(std::move(params))},
          std::move(defaults)) {}

bool Adam::skip_where(const at::Tensor& found_inf) {
  found_inf_ = found_inf;
  return true;
}

std::optional<std::string> Adam::capture_objection() const {
  return std::nullopt;
}

void Adam::update(const Options& base, Batch& batch) {
  const auto& options = static_cast<const AdamOptions&>(base);
  if (options.decoupled_weight_decay()) {
    run(options, batch, found_inf_, fused_adamw);
  } else {
    run(options, batch, found_inf_, fused_adam);
  }
}

std::vector<StateField> Adam::state_fields() const {
  return {kAdamStep, kExpAvg, kExpAvgSq, kMaxExpAvgSq};
}

AdamWOptions::AdamWOptions(double lr) {
  this->lr(lr);
}

std::vector<OptionField> AdamWOptions::fields() {
  return {
      {"lr", lr_, OptionRange::NotNegative},
      {"betas", betas_, OptionRange::Fraction},
      {"eps", eps_, OptionRange::NotNegative},
      {"weight_decay", weight_decay_, OptionRange::NotNegative},
      {"amsgrad", amsgrad_},
      {"maximize", maximize_},
      {"foreach", foreach_},
      {"capturable", capturable_},
      {"differentiable", not_differentiable()},
      {"fused", fused_},
      {"decoupled_weight_decay",
       OptionField::Fixed{
           true, "Load it into an Adam, which has both kinds."}}};
}

AdamW::AdamW(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    AdamWOptions defaults)
    : Optimizer(
          "AdamW",
          param_groups,
          std::make_unique<AdamWOptions>(std::move(defaults))) {}

AdamW::AdamW(std::vector<at::Tensor> params, AdamWOptions defaults)
    : AdamW(
          {torch::optim::OptimizerParamGroup(std::move(params))},
          std::move(defaults)) {}

bool AdamW::skip_where(const at::Tensor& found_inf) {
  found_inf_ = found_inf;
  return true;
}

std::optional<std::string> AdamW::capture_objection() const {
  return std::nullopt;
}

void AdamW::update(const Options& base, Batch& batch) {
  run(static_cast<const AdamWOptions&>(base), batch, found_inf_, fused_adamw);
}

std::vector<StateField> AdamW::state_fields() const {
  return {kAdamStep, kExpAvg, kExpAvgSq, kMaxExpAvgSq};
}

} // namespace tessera::optim
