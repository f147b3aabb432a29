// A run in a few numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "report/run.h"

namespace tessera::report {

struct Summary {
  std::string state; // "finished", "stopped", "failed", "no end"
  int64_t last_step = 0;
  int64_t num_steps = 0; // that were logged and not superseded
  int64_t num_repeated = 0; // steps that were run again
  int64_t num_skipped = 0; // of num_steps: their gradients were not finite
  std::optional<double> first_loss;
  std::optional<double> final_loss;
  int64_t final_loss_step = 0;
  std::optional<Eval> last_eval;
  std::optional<Eval> best_eval; // of those that are finite
  double tokens = 0; // of the steps that count
  double seconds = 0; // of all attempts
  std::optional<double> median_tokens_per_second;
  std::optional<double> peak_memory_bytes;
  int64_t peak_memory_step = 0;
  std::vector<int64_t> worlds; // as they changed
};

Summary summarize(const Run& run);

/// The same in five lines of text, each with its end; six lines for a run that
/// failed.
std::string summary_text(const Run& run);
/// The same of a run that is called `name`.
std::string summary_text(const Run& run, const std::string& name);

/// "3 of 120 lines could not be read: line 7: ...", one problem per line; empty
/// if there is no problem.
std::string problems_text(const Run& run);

} // namespace tessera::report
