#include "metrics.h"

#include <vector>

namespace gpt {

MetricsFiles::MetricsFiles(const std::filesystem::path& run, int64_t step)
    : table_(
          run / "metrics.csv",
          {"loss",
           "lr",
           "grad_norm",
           "loss_scale",
           "skipped",
           "seconds",
           "tokens_per_second",
           "memory_bytes",
           "mfu",
           "validation_loss"},
          tessera::CsvLogOptions().resumed_from(step)),
      events_(
          run / "tensorboard",
          tessera::EventWriterOptions().purge_step(step + 1)) {}

void MetricsFiles::write(const StepMetrics& metrics) {
  const auto memory = static_cast<double>(metrics.memory_bytes);
  table_.row(
      metrics.step,
      {metrics.loss,
       metrics.lr,
       metrics.grad_norm,
       metrics.loss_scale,
       metrics.skipped ? 1 : 0,
       metrics.seconds,
       metrics.tokens_per_second,
       memory,
       metrics.mfu,
       metrics.validation_loss});
  std::vector<tessera::EventScalar> points{
      {"train/loss", metrics.loss},
      {"train/lr", metrics.lr},
      {"train/grad_norm", metrics.grad_norm},
      {"speed/tokens_per_second", metrics.tokens_per_second},
      {"memory/bytes", memory}};
  if (metrics.loss_scale) {
    points.push_back({"train/loss_scale", *metrics.loss_scale});
  }
  if (metrics.mfu) {
    points.push_back({"speed/mfu", *metrics.mfu});
  }
  if (metrics.validation_loss) {
    points.push_back({"validation/loss", *metrics.validation_loss});
  }
  events_.add_step(metrics.step, points);
}

} // namespace gpt
