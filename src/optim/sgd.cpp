#include <tessera/optim/sgd.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_fused_sgd.h>

#include <utility>

#include "optim/option_fields.h"

namespace tessera::optim {
namespace {

constexpr StateField kMomentumBuffer{
    "momentum_buffer",
    StateField::Kind::LikeParam,
    /*is_required=*/false};

/// LibTorch 2.11 to 2.13 on the CPU: the fused kernel leaves most elements of
/// half and bfloat16 as they are (pytorch issue 191763).
bool is_fused_broken(const at::Tensor& param) {
  return param.is_cpu() && c10::isReducedFloatingType(param.scalar_type());
}

void run_foreach(
    const SGDOptions& options,
    const Batch& batch,
    const std::vector<at::Tensor>& momentum_buffers,
    bool is_first_step) {
  auto steps = batch.gradients;
  if (options.maximize()) {
    steps = at::_foreach_neg(steps);
  }
  if (options.weight_decay() != 0) {
    steps = at::_foreach_add(steps, batch.params, options.weight_decay());
  }
  if (options.momentum() != 0) {
    at::_foreach_mul_(momentum_buffers, options.momentum());
    at::_foreach_add_(
        momentum_buffers, steps, is_first_step ? 1 : 1 - options.dampening());
    steps = options.nesterov()
        ? at::_foreach_add(steps, momentum_buffers, options.momentum())
        : momentum_buffers;
  }
  at::_foreach_add_(batch.params, steps, -options.lr());
}

void run(
    const SGDOptions& options,
    const Batch& batch,
    const std::vector<at::Tensor>& momentum_buffers,
    bool is_first_step) {
  if (is_fused_broken(batch.params.front())) {
    run_foreach(options, batch, momentum_buffers, is_first_step);
    return;
  }
  const auto update = [&](const auto& lr) {
    at::_fused_sgd_(
        batch.params,
        batch.gradients,
        momentum_buffers,
        options.weight_decay(),
        options.momentum(),
        lr,
        options.dampening(),
        options.nesterov(),
        options.maximize(),
        is_first_step);
  };
  if (reads_lr_on_device(options, batch)) {
    update(options.lr_on_device());
  } else {
    update(options.lr());
  }
}

} // namespace

SGDOptions::SGDOptions(double lr) {
  this->lr(lr);
}

std::vector<OptionField> SGDOptions::fields() {
  return {
      {"lr", lr_, OptionRange::NotNegative},
      {"momentum", momentum_, OptionRange::NotNegative},
      {"dampening", dampening_},
      {"weight_decay", weight_decay_, OptionRange::NotNegative},
      {"nesterov", nesterov_},
      {"maximize", maximize_},
      {"foreach", foreach_},
      {"differentiable", not_differentiable()},
      {"fused", fused_}};
}

std::optional<std::string> SGDOptions::objection() const {
  if (nesterov() && (momentum() <= 0 || dampening() != 0)) {
    return "nesterov needs momentum above 0 and dampening 0.";
  }
  return std::nullopt;
}

SGD::SGD(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    SGDOptions defaults)
    : Optimizer(
          "SGD",
          param_groups,
          std::make_unique<SGDOptions>(std::move(defaults))) {}

SGD::SGD(std::vector<at::Tensor> params, SGDOptions defaults)
    : SGD({torch::optim::OptimizerParamGroup(std::move(params))},
          std::move(defaults)) {}

std::optional<std::string> SGD::capture_objection() const {
  return std::nullopt;
}

void SGD::update(const Options& base, Batch& batch) {
  const auto& options = static_cast<const SGDOptions&>(base);
  if (options.momentum() == 0) {
    run(options, batch, {}, /*is_first_step=*/false);
    return;
  }
  // The first step of a parameter uses no dampening, and the kernel takes this
  // flag for the whole batch.
  auto [going, fresh] = batch.split_by(kMomentumBuffer);
  if (!going.params.empty()) {
    run(options, going, going.state(kMomentumBuffer), /*is_first_step=*/false);
  }
  if (!fresh.params.empty()) {
    run(options, fresh, fresh.state(kMomentumBuffer), /*is_first_step=*/true);
  }
}

std::vector<StateField> SGD::state_fields() const {
  return {kMomentumBuffer};
}

} // namespace tessera::optim
