#include <tessera/optim/rmsprop.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>

#include <utility>

#include "optim/option_fields.h"

namespace tessera::optim {
namespace {

using Kind = StateField::Kind;
constexpr StateField kRmsPropStep{"step", Kind::HostScalar};
constexpr StateField kSquareAvg{"square_avg", Kind::LikeParam};
constexpr StateField kRmsPropMomentum{
    "momentum_buffer",
    Kind::LikeParam,
    /*is_required=*/false};
constexpr StateField kGradAvg{
    "grad_avg",
    Kind::LikeParam,
    /*is_required=*/false};

} // namespace

RMSpropOptions::RMSpropOptions(double lr) {
  this->lr(lr);
}

std::vector<OptionField> RMSpropOptions::fields() {
  return {
      {"lr", lr_, OptionRange::NotNegative},
      {"momentum", momentum_, OptionRange::NotNegative},
      {"alpha", alpha_, OptionRange::NotNegative},
      {"eps", eps_, OptionRange::NotNegative},
      {"centered", centered_},
      {"weight_decay", weight_decay_, OptionRange::NotNegative},
      {"capturable", not_capturable()},
      {"foreach", foreach_},
      {"maximize", maximize_},
      {"differentiable", not_differentiable()}};
}

RMSprop::RMSprop(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    RMSpropOptions defaults)
    : Optimizer(
          "RMSprop",
          param_groups,
          std::make_unique<RMSpropOptions>(std::move(defaults))) {}

RMSprop::RMSprop(std::vector<at::Tensor> params, RMSpropOptions defaults)
    : RMSprop(
          {torch::optim::OptimizerParamGroup(std::move(params))},
          std::move(defaults)) {}

void RMSprop::update(const Options& base, Batch& batch) {
  const auto& options = static_cast<const RMSpropOptions&>(base);
  const double share = 1 - options.alpha();
  at::_foreach_add_(batch.state(kRmsPropStep), 1);
  auto gradients = batch.gradients;
  if (options.maximize()) {
    gradients = at::_foreach_neg(gradients);
  }
  if (options.weight_decay() != 0) {
    gradients =
        at::_foreach_add(gradients, batch.params, options.weight_decay());
  }

  const auto square_avgs = batch.state(kSquareAvg);
  at::_foreach_mul_(square_avgs, options.alpha());
  at::_foreach_addcmul_(square_avgs, gradients, gradients, share);
  // In Python's order: it makes momentum_buffer first.
  const auto momentum_buffers = options.momentum() > 0
      ? batch.state(kRmsPropMomentum)
      : std::vector<at::Tensor>();
  std::vector<at::Tensor> scales;
  if (options.centered()) {
    const auto grad_avgs = batch.state(kGradAvg);
    at::_foreach_lerp_(grad_avgs, gradients, share);
    scales = at::_foreach_addcmul(square_avgs, grad_avgs, grad_avgs, -1);
    at::_foreach_sqrt_(scales);
  } else {
    scales = at::_foreach_sqrt(square_avgs);
  }
  at::_foreach_add_(scales, options.eps());

  if (options.momentum() > 0) {
    at::_foreach_mul_(momentum_buffers, options.momentum());
    at::_foreach_addcdiv_(momentum_buffers, gradients, scales);
    at::_foreach_add_(batch.params, momentum_buffers, -options.lr());
  } else {
    at::_foreach_addcdiv_(batch.params, gradients, scales, -options.lr());
  }
}

std::vector<StateField> RMSprop::state_fields() const {
  return {kRmsPropStep, kSquareAvg, kRmsPropMomentum, kGradAvg};
}

} // namespace tessera::optim
