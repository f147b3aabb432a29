// One step of AdamW: ours, LibTorch's own, and what memory allows.
//
//   optim_bench
//
// 20M float32 parameters in 150 tensors, one thread. A step reads parameter,
// gradient and both moments, and writes all but the gradient: 7 streams. The
// limit is the time that an in-place triad (a += s * b, 3 streams) of the same
// length would take for 7. The sides take turns within a repeat.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

namespace {

constexpr int kTensors = 150;
constexpr int64_t kLarge =
    520 * 512; // every second one; as bench/peers/optim.py
constexpr int64_t kSmall = 512;
constexpr int kRepeats = 11;
constexpr int kStepsARepeat = 5;
constexpr double kLearningRate = 1e-4;

std::vector<torch::Tensor> make_params() {
  torch::manual_seed(0);
  std::vector<torch::Tensor> params;
  for (int i = 0; i < kTensors; ++i) {
    params.push_back(
        torch::randn({i % 2 == 0 ? kLarge : kSmall}).requires_grad_());
    params.back().mutable_grad() = torch::randn_like(params.back()) * 1e-3;
  }
  return params;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Something that is timed, and its milliseconds, one a repeat.
struct Side {
  std::function<void()> step;
  std::vector<double> times = {};

  void measure() {
    std::vector<double> of_steps;
    for (int i = 0; i < kStepsARepeat; ++i) {
      const auto start = std::chrono::steady_clock::now();
      step();
      const std::chrono::duration<double, std::milli> elapsed =
          std::chrono::steady_clock::now() - start;
      of_steps.push_back(elapsed.count());
    }
    times.push_back(median(of_steps));
  }
};

} // namespace

int main() {
  at::set_num_threads(1);
  tessera::optim::AdamW adamw(make_params(), kLearningRate);
  torch::optim::AdamW libtorch_adamw(make_params(), kLearningRate);
  const int64_t numel = kTensors / 2 * (kLarge + kSmall);
  auto a = torch::randn({numel});
  const auto b = torch::randn({numel});

  Side ours{[&] { adamw.step(); }};
  Side libtorch{[&] { libtorch_adamw.step(); }};
  Side triad{[&] { a.add_(b, 1e-9); }};
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    for (Side* side : {&ours, &libtorch, &triad}) {
      side->measure();
      if (repeat == 0) { // it warms up
        side->times.clear();
      }
    }
  }
  const auto [least, most] =
      std::minmax_element(ours.times.begin(), ours.times.end());
  std::printf(
      "{\"name\": \"optim/adamw/20M\", \"unit\": \"ms\", \"ours\": %.3f, "
      "\"peers\": {\"libtorch\": %.3f}, \"limit\": %.3f, \"repeats\": %d, "
      "\"spread\": %.2f}\n",
      median(ours.times),
      median(libtorch.times),
      median(triad.times) * 7 / 3,
      kRepeats,
      (*most - *least) / median(ours.times));
  return 0;
}
