#include "evaluation.h"

#include <algorithm>

namespace gpt {
namespace {

using tessera::data::LoaderOptions;
using tessera::data::TokenBatch;
using tessera::data::TokenFile;
using tessera::data::TokenWindows;

TokenWindows spread_over(const TokenFile& tokens, const Settings& settings) {
  return TokenWindows::spread(
      tokens, settings.model.length, num_evaluated(tokens, settings));
}

} // namespace

int64_t num_evaluated(const TokenFile& tokens, const Settings& settings) {
  return std::min(
      settings.eval_windows,
      TokenWindows(tokens, settings.model.length).size());
}

int64_t fewest_rows(int64_t windows, const Settings& settings, int num_ranks) {
  const int64_t rows = settings.rows(num_ranks);
  const int64_t left = windows % (rows * num_ranks); // which the ranks share
  if (left == 0) {
    return rows;
  }
  const int64_t shared = (left + num_ranks - 1) / num_ranks;
  return std::max<int64_t>(left - shared * (num_ranks - 1), 1);
}

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
  parallel_.module().eval();
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
  parallel_.module().train();
  return metrics.reduce().at("loss");
}

} // namespace gpt
