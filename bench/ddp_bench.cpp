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
// limit. Steps take turns, a handful at a time. On a GPU all clip, but steps
// inside backward, which cannot, and their limit; and the step under
// DistributedDataParallel and the plain one are also captured (CapturedStep):
// row ddp/captured/. On the CPU then consolidate_state_dict() of AdamW over 20M
// parameters.
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

struct Way {
  Kind kind = Kind::Plain;
  bool clips = false;
  bool captured = false;
};

class Trainer {
 public:
  Trainer(const tessera::Group& world, const Setting& setting, const Way& way)
      : setting_(setting), way_(way) {
    torch::manual_seed(0);
    model_ = bench::Gpt(setting.config);
    model_->to(setting.device);
    if (way.kind != Kind::Plain) {
      ddp_ = std::make_unique<tessera::DistributedDataParallel<bench::GptImpl>>(
          model_, tessera::DDPOptions().gradient_as_bucket_view(true));
    }
    make_optimizer(world);
    ids_ = setting.make_ids();
    if (way.captured) {
      captured_ = std::make_unique<tessera::CapturedStep>(
          model_,
          tessera::OptimizerRefs{*optimizer_},
          [this](const auto& inputs) { return step_on(inputs[0]); },
          tessera::CapturedStepOptions().require_capture(true));
    }
  }

  void step() {
    if (captured_) {
      (*captured_)({ids_});
    } else {
      step_on(ids_);
    }
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
  torch::Tensor step_on(const torch::Tensor& ids) {
    const auto loss = loss_of(ids);
    loss.backward();
    if (way_.clips) {
      tessera::clip_grad_norm_(model_, 1.0);
    }
    if (way_.kind != Kind::ZeroOverlap) {
      optimizer_->step();
    }
    optimizer_->zero_grad();
    return loss.detach();
  }

  /// On a GPU in bfloat16, from float32 parameters, as bench/peers/ddp.py.
  torch::Tensor loss_of(const torch::Tensor& ids) {
    std::optional<gpt::Autocast> autocast;
    if (setting_.is_cuda()) {
      autocast.emplace(torch::kCUDA, torch::kBFloat16);
    }
    return bench::loss_of(model_, ids);
  }

  void make_optimizer(const tessera::Group& world) {
    const auto make =
        tessera::optimizer_class<tessera::optim::AdamW>(kLearningRate);
    const bool overlaps = way_.kind == Kind::ZeroOverlap;
    if (way_.kind == Kind::Plain || way_.kind == Kind::Ddp) {
      optimizer_ = std::make_unique<tessera::optim::AdamW>(
          model_->parameters(), kLearningRate);
      return;
    }
    auto zero = std::make_unique<tessera::ZeroRedundancyOptimizer>(
        model_->parameters(),
        make,
        tessera::ZeroOptions().overlap_with_ddp(overlaps));
    if (overlaps) {
      ddp_->register_comm_hook(tessera::hook_with_zero_step_interleaved(
          tessera::allreduce_hook(world),
          *ddp_,
          *zero,
          /*shard_buckets=*/true));
    }
    optimizer_ = std::move(zero);
  }

  const Setting setting_;
  const Way way_;
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::DistributedDataParallel<bench::GptImpl>> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  torch::Tensor ids_;
  std::unique_ptr<tessera::CapturedStep> captured_;
};

/// A row, with the positions of its sides among the ways.
struct Contest {
  const char* family;
  size_t ours;
  size_t limit;
};

/// Steps of all ways, in turns.
void measure_steps(
    const Arguments& arguments,
    const tessera::Group& world,
    const Setting& setting,
    const std::vector<Way>& ways,
    const std::vector<Contest>& contests) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (const Way& way : ways) {
    trainers.push_back(std::make_unique<Trainer>(world, setting, way));
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
  for (const Contest& one : contests) {
    if (world.rank() == 0) {
      bench::print(
          {one.family + ("/" + setting.place(world)),
           "ms",
           times[one.ours],
           times[one.limit]});
    }
  }
}

void measure_eager_steps(
    const Arguments& arguments,
    const tessera::Group& world,
    const Setting& setting) {
  const bool clips = setting.is_cuda();
  std::vector<Way> ways{
      {Kind::Plain, clips},
      {Kind::Ddp, clips},
      {Kind::Zero, clips},
      {Kind::ZeroOverlap}};
  size_t without_clipping = 0;
  if (clips) {
    without_clipping = ways.size();
    ways.push_back({Kind::Plain});
  }
  measure_steps(
      arguments,
      world,
      setting,
      ways,
      {{"ddp", 1, 0}, {"zero", 2, 0}, {"zero_overlap", 3, without_clipping}});
}

void measure_captured_steps(
    const Arguments& arguments,
    const tessera::Group& world,
    const Setting& setting) {
  const auto captured = [](Kind kind) {
    return Way{.kind = kind, .clips = true, .captured = true};
  };
  measure_steps(
      arguments,
      world,
      setting,
      {captured(Kind::Plain), captured(Kind::Ddp)},
      {{"ddp/captured", 1, 0}});
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
  measure_eager_steps(arguments, world, setting);
  if (setting.is_cuda()) {
    measure_captured_steps(arguments, world, setting);
  } else {
    measure_consolidation(arguments, world);
  }
  return 0;
}
