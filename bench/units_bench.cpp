// What a unit costs: 64 small layers, each a unit of its own, above the plain
// model.
//
//   tessera run -n 2 units_bench
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

namespace {

constexpr int kUnits = 64;
constexpr int kWidth = 16;
constexpr int kRepeats = 9;
constexpr int kStepsARepeat = 50;

class Trainer {
 public:
  explicit Trainer(bool sharded) {
    torch::manual_seed(0);
    for (int i = 0; i < kUnits; ++i) {
      model_->push_back(torch::nn::Linear(kWidth, kWidth));
    }
    if (sharded) {
      for (const auto& layer : *model_) {
        tessera::fully_shard(*layer.ptr());
      }
      tessera::fully_shard(*model_);
    }
    optimizer_ = std::make_unique<tessera::optim::AdamW>(
        tessera::parameters(*model_), 1e-4);
    input_ = torch::randn({8, kWidth});
  }

  void step() {
    model_->forward(input_).square().mean().backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  /// Microseconds a step on the slowest rank.
  double measure(const tessera::Group& world) {
    world.barrier();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kStepsARepeat; ++i) {
      step();
    }
    const std::chrono::duration<double, std::micro> elapsed =
        std::chrono::steady_clock::now() - start;
    auto slowest =
        torch::full({1}, elapsed.count() / kStepsARepeat, torch::kDouble);
    world.all_reduce(slowest, tessera::ReduceOp::Max);
    return slowest.item<double>();
  }

 private:
  torch::nn::Sequential model_;
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
  torch::Tensor input_;
};

} // namespace

int main() {
  const auto world = tessera::init();
  Trainer sharded(true);
  Trainer plain(false);
  std::vector<double> overheads; // of a unit
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    const double ours = sharded.measure(world);
    const double limit = plain.measure(world);
    if (repeat > 0) { // the first warms up
      overheads.push_back((ours - limit) / kUnits);
    }
  }
  if (world.rank() == 0) {
    std::sort(overheads.begin(), overheads.end());
    const double median = overheads[overheads.size() / 2];
    std::printf(
        "{\"name\": \"units/linear16x64/world%d\", \"unit\": \"us\", "
        "\"ours\": %.2f, \"peers\": {}, \"repeats\": %d, \"spread\": %.2f}\n",
        world.size(),
        median,
        kRepeats,
        (overheads.back() - overheads.front()) / median);
  }
  return 0;
}
