// One step of AdamW: ours, LibTorch's own, and the limit that memory sets.
//
//   optim_bench
//   optim_bench cuda
//
// 20M float32 parameters in 150 tensors, one thread. A step reads parameter,
// gradient and both moments, and writes all but the gradient: 7 streams. The
// limit is the time that an in-place triad (a += s * b, 3 streams) of the same
// length would take for 7. The sides take turns within a repeat.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "harness.h"
#include "setting.h"

namespace {

constexpr int kTensors = 150;
constexpr int64_t kLarge =
    520 * 512; // every second one; as bench/peers/optim.py
constexpr int64_t kSmall = 512;
constexpr int kRepeats = 5; // per round
constexpr int kStepsARepeat = 5;
constexpr double kLearningRate = 1e-4;

std::vector<torch::Tensor> make_params(const torch::Device& device) {
  torch::manual_seed(0);
  std::vector<torch::Tensor> params;
  for (int i = 0; i < kTensors; ++i) {
    params.push_back(
        torch::randn({i % 2 == 0 ? kLarge : kSmall}, device).requires_grad_());
    params.back().mutable_grad() = torch::randn_like(params.back()) * 1e-3;
  }
  return params;
}

/// Milliseconds per call: the median of a few.
double measure(
    const torch::Device& device,
    int steps,
    const std::function<void()>& step) {
  bench::Samples times;
  for (int i = 0; i < steps; ++i) {
    times.push_back(bench::milliseconds([&] {
      step();
      bench::synchronize(device);
    }));
  }
  return bench::median(times);
}

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const torch::Device device(arguments.word(0, "cpu"));
  at::set_num_threads(1);
  tessera::optim::AdamW adamw(make_params(device), kLearningRate);
  torch::optim::AdamW libtorch_adamw(make_params(device), kLearningRate);
  const int64_t numel = kTensors / 2 * (kLarge + kSmall);
  auto a = torch::randn({numel}, device);
  const auto b = torch::randn({numel}, device);

  const std::string place = device.is_cuda() ? "cuda" : "cpu";
  bench::Row row{"optim/adamw/20M/" + place, "ms", {}};
  const int steps = arguments.times(kStepsARepeat);
  for (int repeat = 0; repeat <= arguments.times(kRepeats); ++repeat) {
    const double ours = measure(device, steps, [&] { adamw.step(); });
    const double libtorch =
        measure(device, steps, [&] { libtorch_adamw.step(); });
    const double triad = measure(device, steps, [&] { a.add_(b, 1e-9); });
    if (repeat > 0) { // the first warms up
      row.ours.push_back(ours);
      row.peers["libtorch"].push_back(libtorch);
      row.limit.push_back(triad * 7 / 3);
    }
  }
  bench::print(row);
  return 0;
}
