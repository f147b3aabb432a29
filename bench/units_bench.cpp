// What a unit costs: 64 small layers, each a unit of its own, above the plain
// model.
//
//   tessera run -n 2 units_bench
//   units_bench cuda                  # alone, on a GPU
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <memory>
#include <string>

#include "harness.h"
#include "setting.h"

namespace {

constexpr int kUnits = 64;
constexpr int kWidth = 16;
constexpr int kRepeats = 3; // a round
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
        tessera::fully_shard(*layer.ptr());
      }
      tessera::fully_shard(*model_);
    }
    optimizer_ = std::make_unique<tessera::optim::AdamW>(
        tessera::parameters(*model_), 1e-4);
    input_ = torch::randn({8, kWidth}, device);
  }

  void step() {
    model_->forward(input_).square().mean().backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  /// Microseconds a step on the slowest rank.
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

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const torch::Device device(arguments.word(0, "cpu"));
  const auto world = tessera::init();
  Trainer sharded(device, true);
  Trainer plain(device, false);
  const std::string place = device.is_cuda() ? "cuda" : "cpu";
  bench::Row row{
      "units/linear16x64/" + place + std::to_string(world.size()), "us", {}};
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
  return 0;
}
