// One training step: a sharded GPT against the plain one, on the same ranks.
//
//   tessera run -n 2 step_bench              # tiny, on the CPU
//   step_bench 124M cuda                     # alone, on a GPU, in bfloat16
//
// The plain model communicates nothing: each rank trains its own. It is the
// limit. Steps of the two take turns, a handful at a time. On a GPU the sharded
// model computes in bfloat16 from float32 shards, the plain one has bfloat16
// parameters.
#include <tessera/tessera.h>

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpt.h"

namespace {

constexpr int kRepeats = 9;
constexpr int kStepsARepeat = 8;
constexpr int kWarmUp = 4;

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
      {"tiny", {}},
      {"124M", {50304, 768, 12, 12, 1024, 8}},
      {"774M", {50304, 1280, 20, 36, 1024, 8}}};
  Setting setting;
  setting.name = argc > 1 ? argv[1] : "tiny";
  setting.config = configs.at(setting.name);
  setting.device = torch::Device(argc > 2 ? argv[2] : "cpu");
  return setting;
}

/// A model with its optimizer.
class Trainer {
 public:
  Trainer(const Setting& setting, bool sharded) : setting_(setting) {
    torch::manual_seed(0);
    const auto& config = setting.config;
    model_ = bench::Gpt(config);
    model_->to(setting.device);
    if (sharded) {
      tessera::FullyShardOptions options;
      if (setting.is_cuda()) {
        options.mp_policy(tessera::MixedPrecisionPolicy()
                              .param_dtype(torch::kBFloat16)
                              .reduce_dtype(torch::kFloat));
      }
      for (const auto& block : *model_->blocks) {
        tessera::fully_shard(*block, options);
      }
      tessera::fully_shard(*model_, options);
    } else if (setting.is_cuda()) {
      model_->to(torch::kBFloat16);
    }
    optimizer_ = std::make_unique<tessera::optim::AdamW>(
        tessera::parameters(*model_), 1e-4);
    ids_ =
        torch::randint(
            0, config.vocabulary, {config.batch, config.length}, torch::kLong)
            .to(setting.device);
  }

  void step() {
    const auto logits = model_->forward(ids_);
    const auto loss = torch::cross_entropy_loss(
        logits.view({-1, logits.size(-1)}).to(torch::kFloat), ids_.view({-1}));
    loss.backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  /// Milliseconds a step on the slowest rank.
  double measure(const tessera::Group& world) {
    world.barrier();
    synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kStepsARepeat; ++i) {
      step();
    }
    synchronize();
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - start;
    auto slowest =
        torch::full({1}, elapsed.count() / kStepsARepeat, torch::kDouble);
    world.all_reduce(slowest, tessera::ReduceOp::Max);
    return slowest.item<double>();
  }

 private:
  void synchronize() const {
    if (setting_.is_cuda()) {
      torch::cuda::synchronize();
    }
  }

  const Setting setting_;
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
  torch::Tensor ids_;
};

/// Megabytes that a model and its training take at most on a GPU.
double peak_megabytes(const Setting& setting, bool sharded) {
  torch::empty({1}, setting.device); // there are no figures before first use
  auto* allocator = c10::getDeviceAllocator(torch::kCUDA);
  allocator->emptyCache();
  allocator->resetPeakStats(0);
  {
    Trainer trainer(setting, sharded);
    for (int i = 0; i < kWarmUp; ++i) {
      trainer.step();
    }
    torch::cuda::synchronize();
  }
  constexpr auto kAll =
      static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator->getDeviceStats(0);
  return static_cast<double>(stats.allocated_bytes[kAll].peak) / 1e6;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

} // namespace

int main(int argc, char** argv) {
  const Setting setting = parse(argc, argv);
  const auto world = tessera::init();
  if (setting.is_cuda()) {
    const double ours = peak_megabytes(setting, true);
    const double plain = peak_megabytes(setting, false);
    std::printf(
        "{\"name\": \"step/peak-memory/gpt-%s/cuda%d\", \"unit\": \"MB\", "
        "\"ours\": %.0f, \"peers\": {}, \"limit\": %.0f, \"repeats\": 1, "
        "\"spread\": 0.0}\n",
        setting.name.c_str(),
        world.size(),
        ours,
        plain);
  }
  Trainer sharded(setting, true);
  Trainer plain(setting, false);
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
        "{\"name\": \"step/gpt-%s/%s%d\", \"unit\": \"ms\", \"ours\": %.2f, "
        "\"peers\": {}, \"limit\": %.2f, \"repeats\": %d, \"spread\": %.2f}\n",
        setting.name.c_str(),
        setting.is_cuda() ? "cuda" : "cpu",
        world.size(),
        median(ours),
        median(limit),
        kRepeats,
        (*most - *least) / median(ours));
  }
  return 0;
}
