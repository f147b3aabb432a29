#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>

#include "corpus.h"
#include "live.h"
#include "parallel.h"
#include "settings.h"
#include "windows.h"

namespace gpt {

/// Rises for `warmup` steps, then falls along a half cosine to `min_lr`. Steps
/// count from 0.
double learning_rate(const Settings& settings, int64_t step);

/// One run: RUN/log.jsonl, RUN/checkpoints, RUN/report.html. All ranks make the
/// same calls.
class Trainer {
 public:
  Trainer(const tessera::Group& world, const Settings& settings, Corpus corpus);

  /// Trains from the newest checkpoint, if there is one, to the last step.
  /// Returns early, with a checkpoint, after SIGTERM or SIGINT on any rank.
  /// Throws std::runtime_error if gradients or parameters are not finite.
  void train();
  /// The mean loss over --eval-windows windows of the validation text; the same
  /// on any number of ranks, but for rounding.
  double evaluate();
  /// Continues the text of --prompt, and prints the result.
  void write_sample();
  /// Resumes from the newest checkpoint. False if there is none.
  bool resume();

  int64_t step() const {
    return step_;
  }

 private:
  struct StepResult {
    double loss = 0; // the mean over the batch
    double grad_norm = 0;
    bool stop = false; // some rank was asked to stop
  };

  void announce(bool resumed);
  void make_steps();
  StepResult train_step();
  std::string sample();
  void after_step(const StepResult& result, const tessera::StepReport& report);
  bool has_finite_parameters();
  void save();
  void note_saved();
  void wait_for_save();
  void write_page();
  void finish(const std::string& reason);

  const tessera::Group world_;
  const Settings settings_;
  Corpus corpus_;
  const torch::Device device_;
  const Windows train_windows_;
  const Windows validation_windows_;
  Parallel parallel_;
  tessera::TrainingState state_;
  tessera::checkpoint::Manager checkpoints_;
  tessera::StepMonitor monitor_;
  std::optional<tessera::RunLog> log_; // while training
  Live live_;
  std::optional<tessera::StepTrace> trace_;

  int64_t step_ = 0; // done
  int64_t windows_seen_ = 0;
  struct Save {
    int64_t step = 0;
    double blocked_seconds = 0;
    bool is_logged = false;
  };
  std::optional<Save> newest_; // of this process
};

} // namespace gpt
