// One training step: a sharded GPT against the plain one, on the same ranks.
//
//   tessera run -n 2 step_bench
//
// The plain model communicates nothing: each rank trains its own. It is the
// limit. Steps of the two take turns, a handful at a time.
#include <tessera/tessera.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "gpt.h"

namespace {

constexpr int kRepeats = 9;
constexpr int kStepsARepeat = 8;
constexpr int kWarmUp = 4;

/// A model with its optimizer.
class Trainer {
 public:
  Trainer(const bench::GptConfig& config, bool sharded) {
    torch::manual_seed(0);
    model_ = bench::Gpt(config);
    if (sharded) {
      for (const auto& block : *model_->blocks) {
        tessera::fully_shard(*block);
      }
      tessera::fully_shard(*model_);
    }
    optimizer_ = std::make_unique<tessera::optim::AdamW>(
        tessera::parameters(*model_), 1e-4);
    ids_ = torch::randint(
        0, config.vocabulary, {config.batch, config.length}, torch::kLong);
  }

  void step() {
    const auto logits = model_->forward(ids_);
    const auto loss = torch::cross_entropy_loss(
        logits.view({-1, logits.size(-1)}), ids_.view({-1}));
    loss.backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  /// Milliseconds a step on the slowest rank.
  double measure(const tessera::Group& world) {
    world.barrier();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kStepsARepeat; ++i) {
      step();
    }
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - start;
    auto slowest =
        torch::full({1}, elapsed.count() / kStepsARepeat, torch::kDouble);
    world.all_reduce(slowest, tessera::ReduceOp::Max);
    return slowest.item<double>();
  }

 private:
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
  torch::Tensor ids_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

} // namespace

int main() {
  const auto world = tessera::init();
  const bench::GptConfig tiny;
  Trainer sharded(tiny, true);
  Trainer plain(tiny, false);
  for (int i = 0; i < kWarmUp; ++i) {
    sharded.step();
    plain.step();
  }
  std::vector<double> ours;
  std::vector<double> limit;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    ours.push_back(sharded.measure(world));
    limit.push_back(plain.measure(world));
  }
  if (world.rank() == 0) {
    const auto [least, most] = std::minmax_element(ours.begin(), ours.end());
    std::printf(
        "{\"name\": \"step/gpt-tiny/cpu%d\", \"unit\": \"ms\", \"ours\": %.2f, "
        "\"peers\": {}, \"limit\": %.2f, \"repeats\": %d, \"spread\": %.2f}\n",
        world.size(),
        median(ours),
        median(limit),
        kRepeats,
        (*most - *least) / median(ours));
  }
  return 0;
}
