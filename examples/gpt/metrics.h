#pragma once

#include <tessera/tessera.h>

#include <cstdint>
#include <filesystem>
#include <optional>

namespace gpt {

/// What is known of a step after it was made.
struct StepMetrics {
  int64_t step = 0;
  double loss = 0;
  double lr = 0;
  double grad_norm = 0;
  std::optional<double> loss_scale; // of float16
  bool skipped = false; // by the scaler: no parameter has changed
  double seconds = 0;
  double tokens_per_second = 0;
  int64_t memory_bytes = 0; // of rank 0
  std::optional<double> mfu;
  std::optional<double> validation_loss;
};

/// The curves of a run for other programs: RUN/metrics.csv and RUN/tensorboard.
/// Rank 0 writes; nothing is collective. Errors in writing are warned of.
class MetricsFiles {
 public:
  /// `step` is the step that the run starts from: later ones, which an earlier
  /// attempt left, are cut off or hidden.
  MetricsFiles(const std::filesystem::path& run, int64_t step);

  void write(const StepMetrics& metrics);

 private:
  tessera::CsvLog table_;
  tessera::EventWriter events_;
};

} // namespace gpt
