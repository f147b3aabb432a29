#include <tessera/error.h>
#include <tessera/optim/adamw.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <map>
#include <utility>

namespace tessera::optim {
namespace {

void check(const AdamWOptions& options) {
  const auto [beta1, beta2] = options.betas();
  const auto refuse = [](std::string_view what) {
    raise<c10::ValueError>({.call = "AdamW"}, what);
  };
  if (!(options.lr() >= 0)) {
    refuse(fmt::format("lr is {}, must be 0 or more.", options.lr()));
  }
  if (!(options.eps() >= 0)) {
    refuse(fmt::format("eps is {}, must be 0 or more.", options.eps()));
  }
  if (!(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1)) {
    refuse(fmt::format(
        "betas are {} and {}, must be 0 or more and below 1.", beta1, beta2));
  }
  if (!(options.weight_decay() >= 0)) {
    refuse(fmt::format(
        "weight_decay is {}, must be 0 or more.", options.weight_decay()));
  }
}

/// The lists of one call of the kernel, which wants one dtype and device.
struct Batch {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> exp_avgs;
  std::vector<at::Tensor> exp_avg_sqs;
  std::vector<at::Tensor> max_exp_avg_sqs;
  std::vector<at::Tensor> steps;
};

using BatchKey = std::pair<at::ScalarType, std::string>;

AdamWParamState make_state(
    const at::Tensor& param,
    const AdamWOptions& options) {
  AdamWParamState state;
  state.step(at::zeros({}, param.options().dtype(at::kFloat)));
  state.exp_avg(at::zeros_like(param));
  state.exp_avg_sq(at::zeros_like(param));
  if (options.amsgrad()) {
    state.max_exp_avg_sq(at::zeros_like(param));
  }
  return state;
}

} // namespace

AdamWOptions::AdamWOptions(double lr) : lr_(lr) {}

double AdamWOptions::get_lr() const {
  return lr();
}

void AdamWOptions::set_lr(const double lr) {
  this->lr(lr);
}

AdamW::AdamW(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    AdamWOptions defaults)
    : Optimizer(param_groups, std::make_unique<AdamWOptions>(defaults)) {
  check(defaults);
  for (const auto& group : this->param_groups()) {
    check(static_cast<const AdamWOptions&>(group.options()));
  }
}

AdamW::AdamW(std::vector<at::Tensor> params, AdamWOptions defaults)
    : AdamW(
          {torch::optim::OptimizerParamGroup(std::move(params))},
          std::move(defaults)) {}

at::Tensor AdamW::step(LossClosure closure) {
  at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode with_grad(true);
    loss = closure();
  }
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    std::map<BatchKey, Batch> batches;
    for (const at::Tensor& param : group.params()) {
      const at::Tensor& gradient = param.grad();
      if (!gradient.defined() || param.numel() == 0) {
        continue;
      }
      if (gradient.is_sparse()) {
        raise({.call = "AdamW"}, "sparse gradients are not supported.");
      }
      auto& state = state_[param.unsafeGetTensorImpl()];
      if (!state) {
        state = std::make_unique<AdamWParamState>(make_state(param, options));
      }
      auto& kept = static_cast<AdamWParamState&>(*state);
      Batch& batch = batches[{param.scalar_type(), param.device().str()}];
      batch.params.push_back(param);
      batch.gradients.push_back(gradient);
      batch.exp_avgs.push_back(kept.exp_avg());
      batch.exp_avg_sqs.push_back(kept.exp_avg_sq());
      batch.steps.push_back(kept.step());
      if (options.amsgrad()) {
        batch.max_exp_avg_sqs.push_back(kept.max_exp_avg_sq());
      }
    }
    const auto [beta1, beta2] = options.betas();
    for (auto& [key, batch] : batches) {
      at::_foreach_add_(batch.steps, 1);
      at::_fused_adamw_(
          batch.params,
          batch.gradients,
          batch.exp_avgs,
          batch.exp_avg_sqs,
          batch.max_exp_avg_sqs,
          batch.steps,
          options.lr(),
          beta1,
          beta2,
          options.weight_decay(),
          options.eps(),
          options.amsgrad(),
          options.maximize());
    }
  }
  return loss;
}

} // namespace tessera::optim
