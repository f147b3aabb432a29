#include "evaluation.h"

#include <algorithm>

namespace gpt {
namespace {

using tessera::data::LoaderOptions;
using tessera::data::TokenBatch;
using tessera::data::TokenFile;
using tessera::data::TokenWindows;

/// --eval-windows of them, or as many as do not overlap.
TokenWindows spread_over(const TokenFile& tokens, const Settings& settings) {
  const int64_t length = settings.model.length;
  const int64_t most = TokenWindows(tokens, length).size();
  return TokenWindows::spread(
      tokens, length, std::min(settings.eval_windows, most));
}

} // namespace

Evaluation::Evaluation(
    const Settings& settings,
    const tessera::Group& world,
    const TokenFile& tokens,
    Parallel& parallel,
    torch::Device device)
    : parallel_(parallel),
      windows_(
          spread_over(tokens, settings),
          LoaderOptions()
              .batch_size(settings.rows(world.size()))
              .shuffle(false)
              .device(device)) {}

double Evaluation::loss() {
  const torch::NoGradGuard no_grad;
  parallel_.model()->eval();
  tessera::Metrics metrics;
  while (const auto batch = windows_.next()) {
    // At the end of the text some rows are repeats, so that every rank computes
    // as often as the others: a sharded model needs all ranks.
    const int64_t fresh = windows_.num_fresh();
    const int64_t rows = std::max<int64_t>(fresh, 1);
    const TokenBatch some{
        batch->inputs.narrow(0, 0, rows), batch->targets.narrow(0, 0, rows)};
    metrics.mean("loss", parallel_.loss(some), static_cast<double>(fresh));
  }
  parallel_.model()->train();
  return metrics.reduce().at("loss");
}

} // namespace gpt
