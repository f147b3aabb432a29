#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace gpt {

/// How a run ended, for scripts. Fields that are not known are null in JSON.
struct Outcome {
  std::string mode; // as --mode
  /// "finished", "stopped" (by a signal), "failed", or "refused": the settings
  /// make no sense.
  std::string status = "failed";
  std::optional<int64_t> step; // done
  std::optional<double> loss; // of the last step
  /// The mean of this process's last evaluation, and the lowest so far.
  std::optional<double> validation_loss;
  std::optional<double> best_validation_loss;
  std::optional<double> seconds; // that this process trained
  std::optional<double> tokens_per_second; // while it did
  std::optional<double> mfu;
  std::string checkpoint; // the newest that is complete; empty: none
  std::string text; // that was sampled
  std::string error;
};

/// One line, without its end.
std::string json_of(const Outcome& outcome);

} // namespace gpt
