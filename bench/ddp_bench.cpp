// Data parallel training and ZeRO against the plain model, on the same ranks.
//
//   tessera run -n 2 ddp_bench           # tiny, on the CPU
//   ddp_bench 124M cuda                  # alone, on a GPU, in bfloat16
//
// One training step of a GPT with AdamW: under DistributedDataParallel, with
// ZeroRedundancyOptimizer on top, with its steps inside backward, and plainly,
// where each rank trains its own model and communicates nothing; that is the
// limit. Steps take turns, a handful at a time. Then, on the CPU,
// consolidate_state_dict() of AdamW over 20M parameters.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpt.h"

namespace {

constexpr int kRepeats = 9;
constexpr int kStepsARepeat = 8;
constexpr int kWarmUp = 4;
constexpr double kLearningRate = 1e-4;

struct Setting {
  std::string name = "tiny";
  bench::GptConfig config;
  torch::Device device = torch::kCPU;

  bool is_cuda() const {
    return device.is_cuda();
  }
};

Setting parse(int argc, char** argv) {
  const std::map<std::string, bench::GptConfig> configs{
      {"tiny", {}}, {"124M", {50304, 768, 12, 12, 1024, 8}}};
  Setting setting;
  setting.name = argc > 1 ? argv[1] : "tiny";
  setting.config = configs.at(setting.name);
  setting.device = torch::Device(argc > 2 ? argv[2] : "cpu");
  return setting;
}

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
    double limit,
    const char* device = "cpu") {
  if (world.rank() != 0) {
    return;
  }
  const auto [least, most] = std::minmax_element(ours.begin(), ours.end());
  std::printf(
      "{\"name\": \"%s/%s%d\", \"unit\": \"ms\", \"ours\": %.2f, \"peers\": {}, "
      "\"limit\": %.2f, \"repeats\": %zu, \"spread\": %.2f}\n",
      name.c_str(),
      device,
      world.size(),
      median(ours),
      limit,
      ours.size(),
      (*most - *least) / median(ours));
}

enum class Kind { Plain, Ddp, Zero, ZeroOverlap };

class Trainer {
 public:
  Trainer(const tessera::Group& world, const Setting& setting, Kind kind)
      : setting_(setting), kind_(kind) {
    torch::manual_seed(0);
    const auto& config = setting.config;
    model_ = bench::Gpt(config);
    model_->to(setting.device);
    if (setting.is_cuda()) {
      model_->to(torch::kBFloat16);
    }
    if (kind != Kind::Plain) {
      ddp_ = std::make_unique<tessera::DistributedDataParallel<bench::GptImpl>>(
          model_, tessera::DDPOptions().gradient_as_bucket_view(true));
    }
    make_optimizer(world);
    ids_ =
        torch::randint(
            0, config.vocabulary, {config.batch, config.length}, torch::kLong)
            .to(setting.device);
  }

  void step() {
    const auto logits = model_->forward(ids_);
    torch::cross_entropy_loss(
        logits.view({-1, logits.size(-1)}).to(torch::kFloat), ids_.view({-1}))
        .backward();
    if (kind_ != Kind::ZeroOverlap) {
      optimizer_->step();
    }
    optimizer_->zero_grad();
  }

  /// Milliseconds a step on the slowest rank.
  double measure(const tessera::Group& world) {
    synchronize();
    const auto body = [this] {
      for (int i = 0; i < kStepsARepeat; ++i) {
        step();
      }
      synchronize();
    };
    return time_of(world, body) / kStepsARepeat;
  }

 private:
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

  void synchronize() const {
    if (setting_.is_cuda()) {
      torch::cuda::synchronize();
    }
  }

  const Setting setting_;
  const Kind kind_;
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::DistributedDataParallel<bench::GptImpl>> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  torch::Tensor ids_;
};

void bench_steps(const tessera::Group& world, const Setting& setting) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (const Kind kind :
       {Kind::Plain, Kind::Ddp, Kind::Zero, Kind::ZeroOverlap}) {
    trainers.push_back(std::make_unique<Trainer>(world, setting, kind));
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
  const char* device = setting.is_cuda() ? "cuda" : "cpu";
  const char* const names[] = {"", "ddp", "zero", "zero_overlap"};
  for (size_t i = 1; i < times.size(); ++i) {
    print_row(
        world,
        std::string(names[i]) + "/gpt-" + setting.name,
        times[i],
        plain,
        device);
  }
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

int main(int argc, char** argv) {
  const Setting setting = parse(argc, argv);
  const auto world = tessera::init();
  bench_steps(world, setting);
  if (!setting.is_cuda()) {
    bench_consolidation(world);
  }
  return 0;
}
