#include "train/captured/step_effects.h"

#include <tessera/error.h>

#include <algorithm>

#include "engine/schedule.h"

namespace tessera::train {
namespace {

int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

} // namespace

std::vector<double> rates_of(const OptimizerRefs& optimizers) {
  std::vector<double> rates;
  for (const auto& optimizer : optimizers) {
    for (auto& group : optimizer.get().param_groups()) {
      rates.push_back(group.options().get_lr());
    }
  }
  return rates;
}

void StepEffects::before_replay() const {
  for (const auto& unit : written) {
    unit->count_write();
  }
}

void StepEffects::after_replay() const {
  for (const at::Tensor& tensor : changed) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
  for (const auto& [leaf, gradient] : gradients) {
    leaf.mutable_grad() = gradient;
  }
}

EffectsWatch::EffectsWatch(const StepParts& parts) : parts_(parts) {
  for (const auto& unit : parts_.units) {
    writes_.emplace(&unit->root(), unit->num_writes());
  }
  for (const auto* tensors : {&parts.leaves, &parts.params, &parts.buffers}) {
    for (const at::Tensor& tensor : *tensors) {
      versions_.emplace_back(tensor, version_of(tensor));
    }
  }
  for (const at::Tensor& leaf : parts.leaves) {
    gradients_.emplace_back(leaf.grad(), version_of(leaf.grad()));
  }
}

/// In each replay the sum would go to the memory of the gradient that was there
/// while the step was recorded, though that is gone.
void EffectsWatch::check_gradients() const {
  const auto reducers = parts_.reducers();
  const auto stays = [&](const at::Tensor& gradient) { // as a bucket's view
    return std::any_of(
        reducers.begin(), reducers.end(), [&](const ddp::Reducer* reducer) {
          return reducer->holds(gradient);
        });
  };
  for (const auto& [before, version] : gradients_) {
    if (version_of(before) != version && !stays(before)) {
      raise(
          {.call = "CapturedStep"},
          "the step adds to gradients that were there before it, or clears them in place. Call optimizer.zero_grad() in the step, so that it begins or ends without gradients.");
    }
  }
}

/// They would wait in the memory of the recording.
void EffectsWatch::check_waiting() const {
  for (const auto& unit : parts_.units) {
    if (unit->gradients().holds_any()) {
      raise(
          {.call = "CapturedStep"},
          "the step ends while gradients wait for a backward with synchronisation. Make all micro-batches of a step in one call.");
    }
  }
}

StepEffects EffectsWatch::finish() const {
  check_gradients();
  check_waiting();
  StepEffects effects;
  auto writes = writes_;
  for (const auto& unit : parts_.units) {
    const auto before = writes.find(&unit->root());
    if (before != writes.end() && unit->num_writes() != before->second) {
      effects.written.push_back(unit);
      writes.erase(before); // one unit of each model is enough
    }
  }
  for (const auto& [tensor, version] : versions_) {
    if (version_of(tensor) != version) {
      effects.changed.push_back(tensor);
    }
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const at::Tensor& leaf = parts_.leaves[i];
    const auto& [before, version] = gradients_[i];
    if (!before.is_same(leaf.grad()) || version_of(before) != version) {
      effects.gradients.emplace_back(leaf, leaf.grad());
    }
  }
  return effects;
}

void EffectsWatch::undo() const {
  for (const auto& unit : parts_.units) {
    unit->schedule().recover();
    unit->forget_casts();
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    parts_.leaves[i].mutable_grad() = gradients_[i].first;
  }
}

} // namespace tessera::train
