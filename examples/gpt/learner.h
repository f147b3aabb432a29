#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel.h"
#include "schedule.h"
#include "settings.h"

namespace gpt {

/// A step that was made.
struct StepResult {
  double loss = 0; // the mean over the batch
  double lr = 0;
  double grad_norm = 0; // before clipping
  std::optional<double> loss_scale; // of float16, in this step
  bool skipped = false; // gradients overflowed, so no parameter has changed
  bool stop = false; // some rank was asked to stop
};

/// What makes the steps of a run: data, loss scaling, accumulation, schedule,
/// and with --capture the step as a CUDA graph. All ranks make the same calls.
class Learner {
 public:
  /// Collective.
  Learner(
      const Settings& settings,
      const tessera::Group& world,
      tessera::data::TokenFile tokens,
      Parallel& parallel,
      torch::Device device);

  /// The place in the data, the schedule and the loss scale become parts of
  /// `state`, which this object must outlive.
  void add_to(tessera::TrainingState& state);

  /// Makes step `number`, counted from 1. A step that is watched closely is
  /// never replayed, since a replay shows nothing of its parts. Throws
  /// std::runtime_error if the gradients are not finite, which in float16 is an
  /// error only if no loss scale helps. Collective.
  StepResult make_step(int64_t number, bool wants_to_stop, bool is_watched);

  /// Windows in an epoch, and the place behind the last step.
  int64_t num_windows() const {
    return windows_.size();
  }
  tessera::data::Position position() const {
    return windows_.position();
  }

 private:
  /// A run may turn to float16 on the way: checkpoints need not have a scale.
  struct Scaler : tessera::GradScaler {
    using GradScaler::GradScaler;
    bool is_optional(const std::string& /*name*/) const override {
      return true;
    }
  };

  using Tensors = std::vector<torch::Tensor>;

  tessera::GradientAccumulationOptions accumulation_options(int num_ranks);
  Tensors next_batches();
  torch::Tensor run(const Tensors& batches);
  torch::Tensor run_once(const Tensors& batches, int64_t number);
  void require_a_norm(int64_t number) const;
  void require_a_scale(int64_t number) const;

  const Settings& settings_;
  const bool is_last_rank_;
  Parallel& parallel_;
  tessera::data::Loader<tessera::data::TokenWindows> windows_;
  Scaler scaler_; // off unless --precision fp16
  Schedule schedule_;
  tessera::GradientAccumulation accumulation_;
  std::optional<tessera::CapturedStep> captured_; // with --capture
  tessera::Metrics metrics_;
  bool overflows_ = false; // the present step, for --overflow-at
};

} // namespace gpt
