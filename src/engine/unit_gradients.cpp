// Gradients of a unit: from a backward to the leaves.
#include <ATen/ops/_foreach_add.h>

#include <algorithm>
#include <exception>

#include "engine/shard_gradient.h"
#include "engine/unit_parts.h"

namespace tessera::engine {

namespace {

using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;

/// What the hooks of a leaf make of its gradient. The engine would call them,
/// but it adds nothing to leaves here.
at::Tensor after_hooks(const Hooks& hooks, const at::Tensor& gradient) {
  if (hooks.empty()) {
    return gradient;
  }
  torch::autograd::variable_list values{gradient};
  for (const auto& hook : hooks) {
    values = (*hook)(values);
  }
  return values.front();
}

} // namespace

bool Unit::add_gradients(std::vector<at::Tensor>&& gradients) {
  bool any = false;
  for (size_t number = 0; number < bundles_.size(); ++number) {
    std::vector<at::Tensor> mine;
    std::vector<bool> trainable;
    for (size_t position = 0; position < params_.size(); ++position) {
      if (params_[position].bundle == number) {
        mine.push_back(std::move(gradients[position]));
        trainable.push_back(params_[position].trainable);
      }
    }
    if (std::find(trainable.begin(), trainable.end(), true) !=
        trainable.end()) {
      bundles_[number].add_gradients(mine, trainable);
      any = true;
    }
  }
  gradients.clear();
  return any;
}

bool Unit::has_waiting_gradients() const {
  return std::any_of(
      bundles_.begin(), bundles_.end(), [&](const Bundle& bundle) {
        return bundle.has_waiting(all_reduces_) && !bundle.is_reducing();
      });
}

void Unit::start_reduction() {
  for (Bundle& bundle : bundles_) {
    if (bundle.has_waiting(all_reduces_)) {
      bundle.start_reduction(all_reduces_, label_);
    }
  }
}

Unit::Average Unit::wait_for_reduction() {
  Average result{
      std::vector<at::Tensor>(params_.size()),
      std::vector<bool>(params_.size(), true)}; // frozen ones: not in doubt
  for (size_t number = 0; number < bundles_.size(); ++number) {
    Bundle& bundle = bundles_[number];
    if (!bundle.is_reducing()) {
      continue;
    }
    const auto [mean, used] = bundle.finish_reduction(label_);
    if (!mean.defined()) {
      continue;
    }
    if (options_.one_leaf) { // stands for all, at the first one's position
      if (params_.front().trainable) {
        result.gradients.front() = gradient_alias_of(mean, mean.sizes(), 0);
        result.used.front() =
            std::find(used.begin(), used.end(), true) != used.end();
      }
      continue;
    }
    for (size_t position = 0; position < params_.size(); ++position) {
      const Param& param = params_[position];
      if (param.bundle != number || !param.trainable) {
        continue;
      }
      const Layout& layout = bundle.layout();
      const Run run = layout.run(param.index, groups_.shard.rank());
      result.used[position] = used[param.index];
      // An empty leaf has an empty gradient: optimizers step it, and so this
      // rank counts the step as the others do.
      result.gradients[position] =
          gradient_alias_of(mean, param.leaf.sizes(), run.shard_begin);
    }
  }
  return result;
}

std::vector<at::Tensor> Unit::finish_reduction_apart() {
  return wait_for_reduction().gradients;
}

void Unit::hold_hooks() {
  for (Param& param : params_) {
    auto& hooks = meta_of(param.leaf).hooks_;
    if (!hooks.empty()) {
      param.held_hooks = std::exchange(hooks, {});
    }
  }
}

void Unit::release_hooks() noexcept {
  for (Param& param : params_) {
    if (!param.held_hooks.empty()) {
      meta_of(param.leaf).hooks_ = std::exchange(param.held_hooks, {});
    }
  }
}

bool Unit::is_reducing() const {
  return std::any_of(
      bundles_.begin(), bundles_.end(), [](const Bundle& bundle) {
        return bundle.is_reducing();
      });
}

Unit::Reduction Unit::finish_reduction() {
  std::vector<at::Tensor> sums;
  std::vector<at::Tensor> terms;
  auto [gradients, used] = wait_for_reduction();
  std::exception_ptr failure; // the other gradients are there all the same
  zeros_stand_in_.resize(params_.size(), false);
  for (size_t position = 0; position < params_.size(); ++position) {
    if (!gradients[position].defined()) {
      continue;
    }
    const Param& param = params_[position];
    try {
      gradients[position] = after_hooks(
          param.held_hooks.empty() ? torch::autograd::impl::hooks(param.leaf)
                                   : param.held_hooks,
          gradients[position]);
    } catch (...) {
      failure = failure ? failure : std::current_exception();
    }
    at::Tensor& sum = param.leaf.mutable_grad();
    if (sum.defined()) {
      sums.push_back(sum);
      terms.push_back(gradients[position]);
      zeros_stand_in_[position] = zeros_stand_in_[position] && !used[position];
    } else {
      sum = gradients[position];
      zeros_stand_in_[position] = !used[position];
    }
  }
  if (!sums.empty()) {
    at::_foreach_add_(sums, terms);
  }
  return {std::move(used), std::move(failure)};
}

void Unit::drop_unused_gradients(const std::vector<bool>& used_by_any) {
  for (size_t position = 0; position < zeros_stand_in_.size(); ++position) {
    if (zeros_stand_in_[position] && !used_by_any[position]) {
      params_[position].leaf.mutable_grad().reset();
    }
  }
  zeros_stand_in_.clear();
}

void Unit::drop_reduction() noexcept {
  zeros_stand_in_.clear();
  for (Bundle& bundle : bundles_) {
    bundle.drop_reduction();
  }
}

} // namespace tessera::engine
