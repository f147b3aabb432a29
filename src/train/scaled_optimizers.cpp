#include "train/scaled_optimizers.h"

#include <tessera/optim/device_skip.h>

#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "engine/list_parameters.h"
#include "libtorch/recording.h"

namespace tessera::train {
namespace {

/// Lets the kernels of an optimizer decide, as long as it lives.
class SkipScope {
 public:
  SkipScope(torch::optim::Optimizer& optimizer, const at::Tensor& found_inf)
      : skip_(dynamic_cast<optim::DeviceSkip*>(&optimizer)),
        is_on_(skip_ != nullptr && skip_->skip_where(found_inf)) {}
  ~SkipScope() {
    if (is_on_) {
      skip_->skip_where(at::Tensor());
    }
  }
  SkipScope(const SkipScope&) = delete;
  SkipScope& operator=(const SkipScope&) = delete;

  bool is_on() const {
    return is_on_;
  }

 private:
  optim::DeviceSkip* const skip_;
  const bool is_on_;
};

} // namespace

at::Tensor ScaledOptimizer::step() {
  has_stepped = true;
  if (!found_inf.is_cpu() || libtorch::is_recorded_here()) {
    const SkipScope scope(*optimizer, found_inf);
    if (scope.is_on()) {
      return optimizer->step();
    }
  }
  return found_inf.item<float>() != 0 ? at::Tensor() : optimizer->step();
}

bool ScaledOptimizer::belongs_to(torch::nn::Module& model) const {
  std::unordered_set<const c10::TensorImpl*> known;
  for (const auto& [name, param] : engine::list_parameters(model)) {
    known.insert(param.unsafeGetTensorImpl());
  }
  for (const auto& group : optimizer->param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (!known.contains(param.unsafeGetTensorImpl())) {
        return false;
      }
    }
  }
  return true;
}

ScaledOptimizer* ScaledOptimizers::find(
    const torch::optim::Optimizer& optimizer) {
  const auto found =
      std::find_if(all_.begin(), all_.end(), [&](const auto& scaled) {
        return scaled.optimizer == &optimizer;
      });
  return found == all_.end() ? nullptr : &*found;
}

void ScaledOptimizers::add(
    torch::optim::Optimizer& optimizer,
    at::Tensor found_inf) {
  all_.push_back({.optimizer = &optimizer, .found_inf = std::move(found_inf)});
}

bool ScaledOptimizers::has_unstepped() const {
  return std::any_of(all_.begin(), all_.end(), [](const auto& scaled) {
    return !scaled.has_stepped;
  });
}

bool ScaledOptimizers::is_agreed() const {
  return std::all_of(all_.begin(), all_.end(), [](const auto& scaled) {
    return scaled.is_agreed;
  });
}

void ScaledOptimizers::agree(const Group& group) {
  if (is_agreed()) {
    return;
  }
  std::vector<ScaledOptimizer*> open;
  std::vector<at::Tensor> found;
  for (ScaledOptimizer& scaled : all_) {
    if (!scaled.is_agreed) {
      open.push_back(&scaled);
      found.push_back(scaled.found_inf);
    }
  }
  const at::Tensor together = at::stack(found);
  group.all_reduce(together, ReduceOp::Max, "GradScaler: found_inf");
  for (size_t i = 0; i < open.size(); ++i) {
    open[i]->found_inf = together.select(0, static_cast<int64_t>(i));
    open[i]->is_agreed = true;
  }
}

void ScaledOptimizers::note_norm(
    torch::nn::Module& model,
    const at::Tensor& norm,
    bool is_shared) {
  // Clipping by a norm that is not finite has spoiled all gradients.
  const at::Tensor overflows = at::isfinite(norm).logical_not();
  for (ScaledOptimizer& scaled : all_) {
    if (scaled.has_stepped) {
      continue;
    }
    const at::Tensor verdict = overflows.to(scaled.found_inf.options());
    if (is_shared && scaled.belongs_to(model)) {
      // What this rank saw before does not count: gradients may have been
      // mended since, and all ranks must do the same.
      scaled.found_inf = verdict;
      scaled.is_agreed = true;
    } else {
      scaled.found_inf = at::maximum(scaled.found_inf, verdict);
    }
  }
}

at::Tensor ScaledOptimizers::found_inf(const at::Tensor& scale) const {
  at::Tensor any = at::zeros_like(scale);
  for (const ScaledOptimizer& scaled : all_) {
    any = at::maximum(any, scaled.found_inf);
  }
  return any;
}

} // namespace tessera::train
