// Data-parallel training and ZeRO compared with the plain model, on the same
// ranks.
//
//   tessera run -n 2 ddp_bench           # tiny, on the CPU
//   ddp_bench 124M cuda                  # alone, on a GPU, autocast to
//   bfloat16
//
// One training step of a GPT with AdamW: under DistributedDataParallel, with
// ZeroRedundancyOptimizer on top, with its steps inside backward, and plainly,
// where each rank trains its own model without communication; that is the
// limit. Steps take turns, a handful at a time. Then, on the CPU,
// consolidate_state_dict() of AdamW over 20M parameters.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpt/autocast.h"
#include "harness.h"
#include "setting.h"

namespace {

constexpr int kRepeats = 3; // per round
constexpr int kStepsARepeat = 8;
constexpr int kWarmUp = 4;
constexpr double kLearningRate = 1e-4;

using bench::Arguments;
using bench::Setting;

enum class Kind { Plain, Ddp, Zero, ZeroOverlap };

class Trainer {
 public:
  Trainer(const tessera::Group& world, const Setting& setting, Kind kind)
      : setting_(setting), kind_(kind) {
    torch::manual_seed(0);
    model_ = bench::Gpt(setting.config);
    model_->to(setting.device);
    if (kind != Kind::Plain) {
      ddp_ = std::make_unique<tessera::DistributedDataParallel<bench::GptImpl>>(
          model_, tessera::DDPOptions().gradient_as_bucket_view(true));
    }
    make_optimizer(world);
    ids_ = setting.make_ids();
  }

  void step() {
    loss().backward();
    if (kind_ != Kind::ZeroOverlap) {
      optimizer_->step();
    }
    optimizer_->zero_grad();
  }

  /// Milliseconds per step on the slowest rank.
  double measure(const tessera::Group& world, int steps) {
    bench::synchronize(setting_.device);
    const auto body = [&] {
      for (int i = 0; i < steps; ++i) {
        step();
      }
      bench::synchronize(setting_.device);
    };
    return bench::milliseconds(world, body) / steps;
  }

 private:
  /// On a GPU in bfloat16, from float32 parameters, as bench/peers/ddp.py.
  torch::Tensor loss() {
    std::optional<gpt::Autocast> autocast;
    if (setting_.is_cuda()) {
      autocast.emplace(torch::kCUDA, torch::kBFloat16);
    }
    return bench::loss_of(model_, ids_);
  }

  void make_optimizer(const tessera::Group& world) {
    const auto make =
        tessera::optimizer_class<tessera::optim::AdamW>(kLearningRate);
    if (kind_ == Kind::Plain || kind_ == Kind::Ddp) {
      optimizer_ = std::make_unique<tessera::optim::AdamW>(
          model_->parameters(), kLearningRate);
      return;
    }
    auto zero = std::make_unique<tessera::ZeroRedundancyOptimizer>(
        model_->parameters(),
        make,
        tessera::ZeroOptions().overlap_with_ddp(kind_ == Kind::ZeroOverlap));
    if (kind_ == Kind::ZeroOverlap) {
      ddp_->register_comm_hook(tessera::hook_with_zero_step_interleaved(
          tessera::allreduce_hook(world),
          *ddp_,
          *zero,
          /*shard_buckets=*/true));
    }
    optimizer_ = std::move(zero);
  }

  const Setting setting_;
  const Kind kind_;
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::DistributedDataParallel<bench::GptImpl>> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  torch::Tensor ids_;
};

void measure_steps(
    const Arguments& arguments,
    const tessera::Group& world,
    const Setting& setting) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (const Kind kind :
       {Kind::Plain, Kind::Ddp, Kind::Zero, Kind::ZeroOverlap}) {
    trainers.push_back(std::make_unique<Trainer>(world, setting, kind));
  }
  for (int i = 0; i < arguments.times(kWarmUp); ++i) {
    for (const auto& trainer : trainers) {
      trainer->step();
    }
  }
  std::vector<bench::Samples> times(trainers.size());
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    for (size_t i = 0; i < trainers.size(); ++i) {
      times[i].push_back(
          trainers[i]->measure(world, arguments.times(kStepsARepeat)));
    }
  }
  const std::string names[] = {"plain", "ddp", "zero", "zero_overlap"};
  for (size_t i = 1; world.rank() == 0 && i < times.size(); ++i) {
    bench::print(
        {names[i] + "/" + setting.place(world), "ms", times[i], times[0]});
  }
}

/// The limit: a copy of the result.
void measure_consolidation(
    const Arguments& arguments,
    const tessera::Group& world) {
  std::vector<torch::Tensor> params;
  for (int i = 0; i < 150; ++i) { // as bench/peers/ddp.py
    params.push_back(torch::zeros({i % 2 == 0 ? 520 * 512 : 512}));
    params.back().mutable_grad() = torch::ones_like(params.back());
  }
  tessera::ZeroRedundancyOptimizer zero(
      params, tessera::optimizer_class<tessera::optim::AdamW>(kLearningRate));
  zero.step();
  const auto copy = [&] {
    if (world.rank() == 0) {
      zero.state_dict().clone();
    }
  };
  bench::Row row{
      "zero/consolidate/20M/cpu" + std::to_string(world.size()), "ms", {}};
  zero.consolidate_state_dict(); // warms up
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    row.ours.push_back(
        bench::milliseconds(world, [&] { zero.consolidate_state_dict(); }));
    row.limit.push_back(bench::milliseconds(world, copy));
  }
  if (world.rank() == 0) {
    bench::print(row);
  }
}

} // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  const Setting setting(arguments);
  const auto world = tessera::init();
  measure_steps(arguments, world, setting);
  if (!setting.is_cuda()) {
    measure_consolidation(arguments, world);
  }
  return 0;
}
