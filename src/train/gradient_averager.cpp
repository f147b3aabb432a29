#include "train/gradient_averager.h"

#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>

#include "engine/list_parameters.h"
#include "engine/module_units.h"
#include "engine/plain_params.h"

namespace tessera::train {

GradientAverager::GradientAverager(
    torch::nn::Module& model,
    detail::DDPHandle* ddp)
    : model_(model), ddp_(ddp) {
  Group group;
  const auto units = engine::units_in(model);
  if (ddp != nullptr) {
    group = ddp->join_process_group();
  } else if (!units.empty()) {
    group = units.front()->groups().all;
  }
  if (group.valid() && group.size() > 1) {
    groups_.push_back(group);
  }
}

void GradientAverager::check(const char* call) const {
  const auto units = engine::units_in(model_);
  for (const auto& unit : units) {
    if (unit->groups().all.global_ranks() !=
        units.front()->groups().all.global_ranks()) {
      raise<c10::ValueError>(
          {.call = call, .unit = unit->name()},
          fmt::format(
              "it has other ranks than unit \"{}\", so gradients are averaged over different numbers of ranks. Shard the whole model over the same ranks.",
              units.front()->name()));
    }
  }
  const auto params = model_.parameters();
  if (ddp_ == nullptr &&
      std::any_of(params.begin(), params.end(), engine::is_averaged)) {
    raise<c10::ValueError>(
        {.call = call},
        "a DistributedDataParallel averages the gradients of this module. Pass the DistributedDataParallel in place of the module.");
  }
}

void GradientAverager::set_syncs(bool on) const {
  if (ddp_ != nullptr) {
    ddp_->set_requires_gradient_sync(on);
  } else {
    set_requires_gradient_sync(model_, on);
  }
}

at::Device GradientAverager::device() const {
  for (const auto& [name, param] : engine::list_parameters(model_)) {
    return param.device();
  }
  return at::kCPU;
}

void GradientAverager::reduce() const {
  if (ddp_ != nullptr) {
    ddp_->reduce_gradients();
  } else {
    reduce_gradients(model_);
  }
}

void GradientAverager::multiply_gradients(double factor) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> dense;
  for (const auto& [name, param] : engine::list_parameters(model_)) {
    at::Tensor gradient = param.grad();
    if (!gradient.defined() || gradient.numel() == 0) {
      continue;
    }
    if (gradient.layout() == at::kStrided) {
      dense.push_back(gradient);
    } else {
      gradient.mul_(factor);
    }
  }
  if (!dense.empty()) {
    at::_foreach_mul_(dense, factor);
  }
}

void GradientAverager::drop_waiting() const {
  for (const auto& unit : engine::units_in(model_)) {
    unit->gradients().drop_reduction(); // other models of the group keep theirs
  }
}

} // namespace tessera::train
