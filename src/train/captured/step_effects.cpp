#include "train/captured/step_effects.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>

#include "engine/schedule.h"

namespace tessera::train {
namespace {

int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

} // namespace

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

EffectsWatch::EffectsWatch(const StepParts& parts)
    : parts_(parts), reducers_(parts.reducers()) {
  for (const auto& unit : parts_.units) {
    writes_.emplace(&unit->root(), unit->num_writes());
  }
  const auto note_version = [&](const at::Tensor& tensor) {
    versions_.emplace_back(tensor, version_of(tensor));
  };
  std::for_each(parts.leaves.begin(), parts.leaves.end(), note_version);
  for (const auto* tensors : {&parts.params, &parts.buffers}) {
    for (const auto& [name, tensor] : *tensors) {
      note_version(tensor);
    }
  }
  for (const at::Tensor& leaf : parts.leaves) {
    gradients_.emplace_back(leaf.grad(), version_of(leaf.grad()));
  }
}

/// As a bucket's view.
bool EffectsWatch::stays(const at::Tensor& gradient) const {
  return std::any_of(
      reducers_.begin(), reducers_.end(), [&](const ddp::Reducer* reducer) {
        return reducer->holds(gradient);
      });
}

std::vector<at::Tensor> EffectsWatch::old_gradients() const {
  std::vector<at::Tensor> old;
  for (const auto& [before, version] : gradients_) {
    if (before.defined() && !stays(before)) {
      old.push_back(before);
    }
  }
  return old;
}

/// In each replay the step would read and write the memory of the gradient that
/// was there while it was recorded, though that is gone.
void EffectsWatch::check_gradients(
    const std::string& user_of_old_gradients) const {
  for (const auto& [before, version] : gradients_) {
    if (version_of(before) != version && !stays(before)) {
      raise(
          {.call = kCapturedStep},
          "the step adds to gradients that were there before it, or clears them in place. Call optimizer.zero_grad() in the step, so that it begins or ends without gradients.");
    }
  }
  if (!user_of_old_gradients.empty()) {
    raise(
        {.call = kCapturedStep},
        fmt::format(
            "the step uses gradients that were there before it, in {}, and a replay would use their old memory. Compute gradients and use them in the same call: forward, backward, optimizer.step(), optimizer.zero_grad().",
            user_of_old_gradients));
  }
}

/// They would wait in the memory of the recording.
void EffectsWatch::check_waiting() const {
  for (const auto& unit : parts_.units) {
    if (unit->gradients().holds_any()) {
      raise(
          {.call = kCapturedStep},
          "the step ends while gradients wait for a backward with synchronisation. Make all micro-batches of a step in one call.");
    }
  }
}

std::string objection_to_replaced(const std::string& replaced) {
  return replaced.empty()
      ? ""
      : fmt::format(
            "{} of the model is another tensor than when this object was made, and a replay would go on with the old one. Write new values in place, with copy_(), or make the CapturedStep anew.",
            replaced);
}

StepEffects EffectsWatch::finish(
    const std::string& user_of_old_gradients) const {
  check_gradients(user_of_old_gradients);
  check_waiting();
  if (const auto replaced = parts_.replaced(); !replaced.empty()) {
    raise({.call = kCapturedStep}, objection_to_replaced(replaced));
  }
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
