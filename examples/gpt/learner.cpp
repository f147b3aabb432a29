#include "learner.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace gpt {
namespace {

using tessera::data::EpochEnd;
using tessera::data::LoaderOptions;
using tessera::data::TokenWindows;

/// Gradients that overflow with this scale would overflow without any.
constexpr double kLowestScale = 1;

} // namespace

Learner::Learner(
    const Settings& settings,
    const tessera::Group& world,
    tessera::data::TokenFile tokens,
    Parallel& parallel,
    torch::Device device)
    : settings_(settings),
      is_last_rank_(world.rank() == world.size() - 1),
      parallel_(parallel),
      windows_(
          TokenWindows(std::move(tokens), settings.model.length),
          LoaderOptions()
              .batch_size(settings.rows(world.size()))
              .seed(settings.seed)
              .epoch_end(EpochEnd::Continue)
              .auto_commit(false)
              .device(device)),
      scaler_(tessera::GradScalerOptions().enabled(
          settings.precision == Precision::Float16)),
      schedule_(parallel.optimizer(), settings),
      accumulation_(parallel.accumulation(accumulation_options(world.size()))) {
  if (settings.capture) {
    captured_.emplace(
        parallel.module(),
        tessera::OptimizerRefs{parallel.optimizer()},
        [this](const Tensors& batches) { return run(batches); });
  }
}

tessera::GradientAccumulationOptions Learner::accumulation_options(
    int num_ranks) {
  auto options = tessera::GradientAccumulationOptions()
                     .steps(settings_.accumulation(num_ranks))
                     .max_norm(settings_.clip);
  // A captured step cannot read its norm: require_a_norm() does afterwards.
  return scaler_.is_enabled() ? options.scaler(scaler_)
                              : options.error_if_nonfinite(!settings_.capture);
}

void Learner::add_to(tessera::TrainingState& state) {
  state.add("data", windows_);
  state.add("schedule", schedule_);
  if (scaler_.is_enabled()) {
    state.add("scaler", scaler_);
  }
}

/// The whole of training: everything else supports it.
StepResult Learner::make_step(
    int64_t number,
    bool wants_to_stop,
    bool is_watched) {
  tessera::step_token(number); // all ranks are at the same step
  StepResult result{.lr = schedule_.get_last_lr().front()};
  if (scaler_.is_enabled()) {
    result.loss_scale = scaler_.get_scale();
  }
  const Tensors batches = next_batches();
  metrics_.mean(
      "loss",
      captured_ && !is_watched ? (*captured_)(batches)
                               : run_once(batches, number));
  windows_.commit(); // a checkpoint resumes behind this step
  schedule_.step();

  metrics_.max("stop", wants_to_stop ? 1 : 0);
  const auto all_ranks = metrics_.reduce();
  result.loss = all_ranks.at("loss");
  result.stop = all_ranks.at("stop") > 0;
  result.grad_norm = accumulation_.grad_norm().value();
  result.skipped = accumulation_.skipped();
  if (result.skipped) {
    require_a_scale(number);
  } else if (!scaler_.is_enabled()) {
    require_a_norm(number);
  }
  return result;
}

/// The micro-batches of a step: inputs and targets in turns.
Learner::Tensors Learner::next_batches() {
  Tensors batches;
  for (int64_t i = 0; i < accumulation_.steps(); ++i) {
    const auto batch = windows_.next().value(); // epochs follow one another
    batches.push_back(batch.inputs);
    batches.push_back(batch.targets);
  }
  return batches;
}

/// A step: forward and backward of each micro-batch, clipping, and the
/// optimizer. Returns the mean of the losses.
torch::Tensor Learner::run(const Tensors& batches) {
  torch::Tensor sum;
  for (size_t i = 0; i < batches.size(); i += 2) {
    const auto loss =
        parallel_.loss({.inputs = batches[i], .targets = batches[i + 1]});
    sum = sum.defined() ? sum + loss.detach() : loss.detach();
    accumulation_.backward(
        overflows_ ? loss * std::numeric_limits<float>::infinity() : loss);
  }
  return sum / static_cast<double>(batches.size() / 2);
}

torch::Tensor Learner::run_once(const Tensors& batches, int64_t number) try {
  overflows_ = number == settings_.overflow_at && is_last_rank_;
  return run(batches);
} catch (const c10::Error&) {
  // A scaler leaves such a step out, and its norm behind.
  if (scaler_.is_enabled() ||
      std::isfinite(accumulation_.grad_norm().value_or(0))) {
    throw; // something else
  }
  throw std::runtime_error(
      "the gradients of step " + std::to_string(number) +
      " are not finite, so the step was not made. Resume with a lower "
      "--lr or a longer --warmup; if that fails too, remove the newest "
      "checkpoint first.");
}

/// Throws if the gradients of a captured step were not finite. Such a step is
/// made before the norm can be read.
void Learner::require_a_norm(int64_t number) const {
  if (!std::isfinite(accumulation_.grad_norm().value_or(0))) {
    throw std::runtime_error(
        "the gradients of step " + std::to_string(number) +
        " were not finite, and with --capture the step was made all the same: "
        "the parameters of this process are lost. Resume from the newest "
        "checkpoint with a lower --lr or a longer --warmup; if that fails too, "
        "remove that checkpoint first.");
  }
}

/// The scale halves with each step that is skipped.
void Learner::require_a_scale(int64_t number) const {
  if (scaler_.get_scale() >= kLowestScale) {
    return;
  }
  throw std::runtime_error(
      "the gradients of step " + std::to_string(number) +
      " are not finite, and neither were those of the steps before it, "
      "whatever the losses were scaled by: the scale has fallen below 1. "
      "Resume with --precision bf16, a lower --lr or a longer --warmup; if "
      "that fails too, remove the newest checkpoint first.");
}

} // namespace gpt
