#include <tessera/optim/adagrad.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adagrad.h>

#include <utility>

#include "optim/option_fields.h"

namespace tessera::optim {
namespace {

using Kind = StateField::Kind;
constexpr StateField kAdagradStep{"step", Kind::HostScalar};
constexpr StateField kSum{"sum", Kind::LikeParam};

/// Devices other than the CPU have no fused kernel in LibTorch 2.11.
void run_foreach(
    const AdagradOptions& options,
    const Batch& batch,
    const std::vector<at::Tensor>& sums,
    const std::vector<at::Tensor>& steps) {
  auto gradients = batch.gradients;
  if (options.maximize()) {
    gradients = at::_foreach_neg(gradients);
  }
  if (options.weight_decay() != 0) {
    gradients =
        at::_foreach_add(gradients, batch.params, options.weight_decay());
  }
  at::_foreach_addcmul_(sums, gradients, gradients);
  auto deviations = at::_foreach_sqrt(sums);
  at::_foreach_add_(deviations, options.eps());
  std::vector<at::Scalar> rates;
  for (const at::Tensor& step : steps) {
    const double past = *step.const_data_ptr<float>() - 1.0; // on the host
    rates.emplace_back(-options.lr() / (1 + past * options.lr_decay()));
  }
  at::_foreach_addcdiv_(batch.params, gradients, deviations, rates);
}

} // namespace

AdagradOptions::AdagradOptions(double lr) {
  this->lr(lr);
}

std::vector<OptionField> AdagradOptions::fields() {
  return {
      {"lr", lr_, OptionRange::NotNegative},
      {"lr_decay", lr_decay_, OptionRange::NotNegative},
      {"eps", eps_, OptionRange::NotNegative},
      {"weight_decay", weight_decay_, OptionRange::NotNegative},
      {"initial_accumulator_value",
       initial_accumulator_value_,
       OptionRange::NotNegative},
      {"foreach", foreach_},
      {"maximize", maximize_},
      {"differentiable", not_differentiable()},
      {"fused", fused_}};
}

Adagrad::Adagrad(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    AdagradOptions defaults)
    : Optimizer(
          "Adagrad",
          param_groups,
          std::make_unique<AdagradOptions>(std::move(defaults))) {}

Adagrad::Adagrad(std::vector<at::Tensor> params, AdagradOptions defaults)
    : Adagrad(
          {torch::optim::OptimizerParamGroup(std::move(params))},
          std::move(defaults)) {}

void Adagrad::update(const Options& base, Batch& batch) {
  const auto& options = static_cast<const AdagradOptions&>(base);
  const auto steps = batch.state(kAdagradStep);
  const auto sums = batch.state(kSum, options.initial_accumulator_value());
  at::_foreach_add_(steps, 1);
  if (!batch.params.front().is_cpu()) {
    run_foreach(options, batch, sums, steps);
    return;
  }
  at::_fused_adagrad_(
      batch.params,
      batch.gradients,
      sums,
      steps,
      options.lr(),
      options.lr_decay(),
      options.weight_decay(),
      options.eps(),
      options.maximize());
}

std::vector<StateField> Adagrad::state_fields() const {
  return {kAdagradStep, kSum};
}

} // namespace tessera::optim
