#include "evaluation.h"

#include <algorithm>

namespace gpt {

double validation_loss(
    Parallel& parallel,
    const Windows& windows,
    const Settings& settings,
    const tessera::Group& world,
    torch::Device device) {
  const torch::NoGradGuard no_grad;
  auto& model = parallel.model();
  model->eval();
  const int64_t all = std::min(settings.eval_windows, windows.size());
  const int64_t rows = settings.rows(world.size());
  auto sum = torch::zeros({}, torch::kDouble);
  for (int64_t begin = 0; begin < all; begin += rows * world.size()) {
    const int64_t first = begin + world.rank() * rows;
    const int64_t count = std::clamp<int64_t>(all - first, 0, rows);
    // Every rank computes the same number of times: a sharded model needs all
    // ranks.
    const auto batch =
        windows.spread(count > 0 ? first : 0, std::max<int64_t>(count, 1), all);
    const auto loss =
        parallel.loss(batch.inputs.to(device), batch.targets.to(device));
    sum += loss.item<double>() * static_cast<double>(count);
  }
  model->train();
  world.all_reduce(sum, tessera::ReduceOp::Sum, "validation loss");
  return sum.item<double>() / static_cast<double>(all);
}

} // namespace gpt
