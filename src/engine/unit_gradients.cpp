#include "engine/unit_gradients.h"

#include <ATen/ops/_foreach_add.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>

#include "engine/keep_alive.h"
#include "engine/shard_gradient.h"
#include "engine/unit.h"

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

bool UnitGradients::add(std::vector<at::Tensor>&& gradients) {
  const auto& params = unit_.params().all();
  bool any = false;
  for (size_t number = 0; number < unit_.bundles().size(); ++number) {
    std::vector<at::Tensor> mine;
    std::vector<bool> trainable;
    for (size_t position = 0; position < params.size(); ++position) {
      if (params[position].bundle == number) {
        mine.push_back(std::move(gradients[position]));
        trainable.push_back(params[position].trainable);
      }
    }
    if (std::find(trainable.begin(), trainable.end(), true) !=
        trainable.end()) {
      unit_.bundles()[number].gradients().add(mine, trainable);
      any = true;
    }
  }
  gradients.clear();
  return any;
}

bool UnitGradients::has_waiting() const {
  return std::any_of(
      unit_.bundles().begin(),
      unit_.bundles().end(),
      [&](const Bundle& bundle) {
        return bundle.gradients().has_waiting(all_reduces_) &&
            !bundle.gradients().is_reducing();
      });
}

bool UnitGradients::holds_any() const {
  return std::any_of(
      unit_.bundles().begin(), unit_.bundles().end(), [](const Bundle& bundle) {
        return bundle.gradients().has_waiting(/*all_reduce=*/true);
      });
}

void UnitGradients::start_reduction() {
  for (Bundle& bundle : unit_.bundles()) {
    if (bundle.gradients().has_waiting(all_reduces_)) {
      bundle.gradients().start_reduction(all_reduces_, unit_.label());
    }
  }
}

bool UnitGradients::go_on_to_copies() {
  bool any = false;
  for (Bundle& bundle : unit_.bundles()) {
    if (bundle.gradients().is_reducing()) {
      any = bundle.gradients().go_on_to_copies(unit_.label()) || any;
    }
  }
  return any;
}

UnitGradients::Average UnitGradients::wait() {
  const auto& params = unit_.params().all();
  Average result{
      std::vector<at::Tensor>(params.size()),
      std::vector<bool>(params.size(), true)}; // frozen ones: not in doubt
  for (size_t number = 0; number < unit_.bundles().size(); ++number) {
    Bundle& bundle = unit_.bundles()[number];
    if (!bundle.gradients().is_reducing()) {
      continue;
    }
    const auto [mean, used] =
        bundle.gradients().finish_reduction(unit_.label());
    if (!mean.defined()) {
      continue;
    }
    if (unit_.options()
            .one_leaf) { // stands for all, at the first one's position
      if (params.front().trainable) {
        result.gradients.front() = gradient_alias_of(mean, mean.sizes(), 0);
        result.used.front() =
            std::find(used.begin(), used.end(), true) != used.end();
      }
      continue;
    }
    for (size_t position = 0; position < params.size(); ++position) {
      const UnitParam& param = params[position];
      if (param.bundle != number || !param.trainable) {
        continue;
      }
      const Layout& layout = bundle.layout();
      const Run run = layout.run(param.index, unit_.groups().shard.rank());
      result.used[position] = used[param.index];
      // An empty leaf has an empty gradient: optimizers step it, and so this
      // rank counts the step as the others do.
      result.gradients[position] =
          gradient_alias_of(mean, param.leaf.sizes(), run.shard_begin);
    }
  }
  return result;
}

std::vector<at::Tensor> UnitGradients::finish_reduction_apart() {
  return wait().gradients;
}

void UnitGradients::hold_hooks() {
  for (UnitParam& param : unit_.params().all()) {
    auto& hooks = meta_of(param.leaf).hooks_;
    if (!hooks.empty()) {
      param.held_hooks = std::exchange(hooks, {});
    }
  }
}

void UnitGradients::release_hooks() noexcept {
  for (UnitParam& param : unit_.params().all()) {
    if (!param.held_hooks.empty()) {
      meta_of(param.leaf).hooks_ = std::exchange(param.held_hooks, {});
    }
  }
}

bool UnitGradients::is_reducing() const {
  return std::any_of(
      unit_.bundles().begin(), unit_.bundles().end(), [](const Bundle& bundle) {
        return bundle.gradients().is_reducing();
      });
}

UnitGradients::Reduction UnitGradients::finish_reduction() {
  const auto& params = unit_.params().all();
  std::vector<at::Tensor> sums;
  std::vector<at::Tensor> terms;
  auto [gradients, used] = wait();
  std::exception_ptr failure; // the other gradients are there all the same
  zeros_stand_in_.resize(params.size(), false);
  for (size_t position = 0; position < params.size(); ++position) {
    if (!gradients[position].defined()) {
      continue;
    }
    const UnitParam& param = params[position];
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

void UnitGradients::drop_unused(const std::vector<bool>& used_by_any) {
  for (size_t position = 0; position < zeros_stand_in_.size(); ++position) {
    if (zeros_stand_in_[position] && !used_by_any[position]) {
      unit_.params().all()[position].leaf.mutable_grad().reset();
    }
  }
  zeros_stand_in_.clear();
}

void UnitGradients::drop_reduction() noexcept {
  zeros_stand_in_.clear();
  for (Bundle& bundle : unit_.bundles()) {
    bundle.settle();
    bundle.gradients().drop_reduction();
  }
}

} // namespace tessera::engine
