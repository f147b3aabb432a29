// Data parallel training and ZeRO against the plain model, on the same ranks.
//
//   tessera run -n 2 ddp_bench
//
// One training step of the tiny GPT with AdamW: under DistributedDataParallel,
// with ZeroRedundancyOptimizer on top, and plainly, where each rank trains its
// own model and communicates nothing; that is the limit. Steps take turns, a
// handful at a time. Then consolidate_state_dict() of AdamW over 20M
// parameters.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpt.h"

namespace {

constexpr int kRepeats = 9;
constexpr int kStepsARepeat = 8;
constexpr int kWarmUp = 4;
constexpr double kLearningRate = 1e-4;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Milliseconds on the slowest rank.
double time_of(const tessera::Group& world, const std::function<void()>& body) {
  world.barrier();
  const auto start = std::chrono::steady_clock::now();
  body();
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  const auto slowest = torch::full({1}, elapsed.count(), torch::kDouble);
  world.all_reduce(slowest, tessera::ReduceOp::Max);
  return slowest.item<double>();
}

void print_row(
    const tessera::Group& world,
    const std::string& name,
    const std::vector<double>& ours,
    double limit) {
  if (world.rank() != 0) {
    return;
  }
  const auto [least, most] = std::minmax_element(ours.begin(), ours.end());
  std::printf(
      "{\"name\": \"%s/cpu%d\", \"unit\": \"ms\", \"ours\": %.2f, \"peers\": {}, "
      "\"limit\": %.2f, \"repeats\": %zu, \"spread\": %.2f}\n",
      name.c_str(),
      world.size(),
      median(ours),
      limit,
      ours.size(),
      (*most - *least) / median(ours));
}

enum class Kind { Plain, Ddp, DdpAndZero };

class Trainer {
 public:
  explicit Trainer(Kind kind) {
    torch::manual_seed(0);
    const bench::GptConfig config;
    model_ = bench::Gpt(config);
    if (kind != Kind::Plain) {
      ddp_ = std::make_unique<tessera::DistributedDataParallel<bench::GptImpl>>(
          model_, tessera::DDPOptions().gradient_as_bucket_view(true));
    }
    if (kind == Kind::DdpAndZero) {
      optimizer_ = std::make_unique<tessera::ZeroRedundancyOptimizer>(
          model_->parameters(),
          tessera::optimizer_class<tessera::optim::AdamW>(kLearningRate));
    } else {
      optimizer_ = std::make_unique<tessera::optim::AdamW>(
          model_->parameters(), kLearningRate);
    }
    ids_ = torch::randint(
        0, config.vocabulary, {config.batch, config.length}, torch::kLong);
  }

  void step() {
    const auto logits = model_->forward(ids_);
    torch::cross_entropy_loss(
        logits.view({-1, logits.size(-1)}), ids_.view({-1}))
        .backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  double measure(const tessera::Group& world) {
    return time_of(
               world,
               [this] {
                 for (int i = 0; i < kStepsARepeat; ++i) {
                   step();
                 }
               }) /
        kStepsARepeat;
  }

 private:
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::DistributedDataParallel<bench::GptImpl>> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  torch::Tensor ids_;
};

void bench_steps(const tessera::Group& world) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (const Kind kind : {Kind::Plain, Kind::Ddp, Kind::DdpAndZero}) {
    trainers.push_back(std::make_unique<Trainer>(kind));
  }
  std::vector<std::vector<double>> times(trainers.size());
  for (int i = 0; i < kWarmUp; ++i) {
    for (const auto& trainer : trainers) {
      trainer->step();
    }
  }
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (size_t i = 0; i < trainers.size(); ++i) {
      times[i].push_back(trainers[i]->measure(world));
    }
  }
  const double plain = median(times[0]);
  print_row(world, "ddp/gpt-tiny", times[1], plain);
  print_row(world, "zero/gpt-tiny", times[2], plain);
}

/// The limit: a copy of the result.
void bench_consolidation(const tessera::Group& world) {
  std::vector<torch::Tensor> params;
  for (int i = 0; i < 150; ++i) { // as bench/peers/ddp.py
    params.push_back(torch::zeros({i % 2 == 0 ? 520 * 512 : 512}));
    params.back().mutable_grad() = torch::ones_like(params.back());
  }
  tessera::ZeroRedundancyOptimizer zero(
      params, tessera::optimizer_class<tessera::optim::AdamW>(kLearningRate));
  zero.step();
  std::vector<double> ours;
  std::vector<double> copies;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    const double time = time_of(world, [&] { zero.consolidate_state_dict(); });
    const double copy = time_of(world, [&] {
      if (world.rank() == 0) {
        zero.state_dict().clone();
      }
    });
    if (repeat > 0) {
      ours.push_back(time);
      copies.push_back(copy);
    }
  }
  print_row(world, "zero/consolidate/20M", ours, median(copies));
}

} // namespace

int main() {
  const auto world = tessera::init();
  bench_steps(world);
  bench_consolidation(world);
  return 0;
}
