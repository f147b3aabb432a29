#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "corpus.h"
#include "evaluation.h"
#include "language_model.h"
#include "learner.h"
#include "live.h"
#include "metrics.h"
#include "outcome.h"
#include "parallel.h"
#include "saves.h"
#include "settings.h"
#include "utilization.h"

namespace gpt {

/// One run: RUN/log.jsonl, metrics.csv, tensorboard, checkpoints, report.html.
/// All ranks make the same calls.
class Trainer {
 public:
  /// Collective.
  Trainer(
      const tessera::Group& world,
      const Settings& settings,
      Corpus corpus,
      std::unique_ptr<LanguageModel> model);

  /// Trains from the newest checkpoint, if there is one, to the last step.
  /// Returns early, with a checkpoint, after SIGTERM or SIGINT on any rank.
  /// Throws std::runtime_error if gradients or parameters are not finite; in
  /// float16 steps whose gradients are not are skipped at first.
  void train();
  /// The mean loss over --eval-windows windows of the validation text; the same
  /// on any number of ranks, but for rounding.
  double evaluate();
  /// Continues the text of --prompt, and prints the result.
  void write_sample();
  /// Resumes from the newest checkpoint, or the one that --from says. False if
  /// there is none.
  bool resume();

  int64_t step() const {
    return step_;
  }
  /// How the run stands. Not collective.
  Outcome outcome() const;

 private:
  void announce(bool resumed);
  void load_weights(bool resumed);
  void make_steps();
  void after_step(const StepResult& result, const tessera::StepReport& report);
  bool is_due(int64_t every) const;
  std::optional<double> evaluate_if_due();
  void write_page();
  void finish(const std::string& reason);

  const tessera::Group world_;
  const Settings settings_;
  Corpus corpus_;
  const torch::Device device_;
  Parallel parallel_;
  std::optional<Evaluation> evaluation_; // if there is validation text
  std::optional<Learner> learner_; // while training
  Saves saves_;
  const Utilization utilization_;
  tessera::StepMonitor monitor_;
  std::optional<tessera::RunLog> log_; // while training
  std::optional<MetricsFiles> metrics_; // while training
  Live live_;
  std::optional<tessera::StepTrace> trace_;

  int64_t step_ = 0; // done

  // For the outcome, of this process.
  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> started_;
  std::string status_ = "failed"; // until the run ends
  std::optional<double> loss_;
  std::optional<double> validation_loss_;
  double lowest_validation_loss_;
  std::string sample_;
  int64_t steps_made_ = 0;
  int64_t steps_skipped_ = 0; // of these, by the scaler
  double step_seconds_ = 0; // of these
};

} // namespace gpt
