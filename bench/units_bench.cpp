// The cost of a unit: 64 small layers, each a unit of its own, compared with
// the plain model; and what it costs to compare the values that ranks begin
// with, at 1 GB.
//
//   tessera run -n 2 units_bench
//   units_bench cuda                  # alone, on a GPU
//   tessera run -n 2 units_bench cuda # two ranks that share a GPU
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <memory>
#include <string>

#include "harness.h"
#include "setting.h"

namespace {

constexpr int kUnits = 64;
constexpr int kWidth = 16;
constexpr int kRepeats = 3; // per round
constexpr int kStepsARepeat = 50;

class Trainer {
 public:
  Trainer(const torch::Device& device, bool sharded) : device_(device) {
    torch::manual_seed(0);
    for (int i = 0; i < kUnits; ++i) {
      model_->push_back(torch::nn::Linear(kWidth, kWidth));
    }
    model_->to(device);
    if (sharded) {
      for (const auto& layer : *model_) {
        tessera::fully_shard(layer);
      }
      tessera::fully_shard(model_);
    }
    optimizer_ = std::make_unique<tessera::optim::AdamW>(
        tessera::parameters(model_), 1e-4);
    input_ = torch::randn({8, kWidth}, device);
  }

  void step() {
    model_->forward(input_).square().mean().backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  /// Microseconds per step on the slowest rank.
  double measure(const tessera::Group& world, int steps) {
    bench::synchronize(device_);
    return 1e3 / steps * bench::milliseconds(world, [&] {
             for (int i = 0; i < steps; ++i) {
               step();
             }
             bench::synchronize(device_);
           });
  }

 private:
  const torch::Device device_;
  torch::nn::Sequential model_;
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
  torch::Tensor input_;
};

/// Milliseconds that sharding a model and gathering its first unit take.
double measure_start(
    const tessera::Group& world,
    const torch::Device& device,
    int64_t layers,
    bool compares) {
  constexpr int64_t kRows = 2048; // 16 MB per layer
  torch::nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) {
    model->push_back(
        torch::nn::Linear(torch::nn::LinearOptions(kRows, kRows).bias(false)));
  }
  {
    torch::NoGradGuard no_grad;
    for (auto& weight : model->parameters()) {
      weight.fill_(1);
    }
  }
  model->to(device);
  bench::synchronize(device);
  return bench::milliseconds(world, [&] {
    const auto options = tessera::FullyShardOptions().compare_start(compares);
    for (const auto& layer : *model) {
      tessera::fully_shard(layer, options);
    }
    tessera::fully_shard(model, options);
    torch::NoGradGuard no_grad;
    model[0]->as<torch::nn::Linear>()->forward(torch::ones({1, kRows}, device));
    bench::synchronize(device);
  });
}

/// Ours compares the values of the ranks, the limit does not.
void compare_starts(
    const bench::Arguments& arguments,
    const tessera::Group& world,
    const torch::Device& device,
    const std::string& place) {
  const int64_t layers = arguments.is_quick() ? 1 : 64;
  bench::Row row{"units/start-1GB/" + place, "ms", {}};
  for (int repeat = 0; repeat <= arguments.times(kRepeats); ++repeat) {
    const double ours = measure_start(world, device, layers, true);
    const double limit = measure_start(world, device, layers, false);
    if (repeat > 0) { // the first warms up
      row.ours.push_back(ours);
      row.limit.push_back(limit);
    }
  }
  if (world.rank() == 0) {
    bench::print(row);
  }
}

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const torch::Device device(arguments.word(0, "cpu"));
  const auto world = tessera::init();
  Trainer sharded(device, true);
  Trainer plain(device, false);
  const std::string place =
      (device.is_cuda() ? "cuda" : "cpu") + std::to_string(world.size());
  bench::Row row{"units/linear16x64/" + place, "us", {}};
  const int steps = arguments.times(kStepsARepeat);
  for (int repeat = 0; repeat <= arguments.times(kRepeats); ++repeat) {
    const double ours = sharded.measure(world, steps);
    const double limit = plain.measure(world, steps);
    if (repeat > 0) { // the first warms up
      row.ours.push_back((ours - limit) / kUnits);
    }
  }
  if (world.rank() == 0) {
    bench::print(row);
  }
  if (world.size() > 1) { // alone there is nothing to compare
    compare_starts(arguments, world, device, place);
  }
  return 0;
}
