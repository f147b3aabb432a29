// One training step of a sharded GPT, compared with the plain one, on the same
// ranks.
//
//   tessera run -n 2 step_bench              # tiny, on the CPU
//   step_bench 124M cuda                     # alone, on a GPU, in bfloat16
//
// The plain model does not communicate: each rank trains its own. It is the
// limit. Steps of the two take turns, a handful at a time. On a GPU the sharded
// model computes in bfloat16 from float32 shards, the plain one has bfloat16
// parameters.
#include <tessera/tessera.h>

#include <c10/core/CachingDeviceAllocator.h>

#include <memory>

#include "harness.h"
#include "setting.h"

namespace {

constexpr int kRepeats = 3; // per round
constexpr int kStepsARepeat = 8;
constexpr int kWarmUp = 4;

using bench::Arguments;
using bench::Setting;

/// A model with its optimizer.
class Trainer {
 public:
  Trainer(const Setting& setting, bool sharded) : setting_(setting) {
    torch::manual_seed(0);
    model_ = bench::Gpt(setting.config);
    model_->to(setting.device);
    if (sharded) {
      tessera::FullyShardOptions options;
      if (setting.is_cuda()) {
        options.mp_policy(tessera::MixedPrecisionPolicy()
                              .param_dtype(torch::kBFloat16)
                              .reduce_dtype(torch::kFloat));
      }
      for (const auto& block : *model_->blocks) {
        tessera::fully_shard(block, options);
      }
      tessera::fully_shard(model_, options);
    } else if (setting.is_cuda()) {
      model_->to(torch::kBFloat16);
    }
    optimizer_ = std::make_unique<tessera::optim::AdamW>(
        tessera::parameters(model_), 1e-4);
    ids_ = setting.make_ids();
  }

  void step() {
    bench::loss_of(model_, ids_).backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  /// Milliseconds per step on the slowest rank.
  double measure(const tessera::Group& world, int steps) {
    bench::synchronize(setting_.device);
    const double all = bench::milliseconds(world, [&] {
      for (int i = 0; i < steps; ++i) {
        step();
      }
      bench::synchronize(setting_.device);
    });
    return all / steps;
  }

 private:
  const Setting setting_;
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
  torch::Tensor ids_;
};

/// The peak of memory that a model and its training take on a GPU, in
/// megabytes.
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

} // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  const Setting setting(arguments);
  const auto world = tessera::init();
  if (setting.is_cuda()) {
    const bench::Row memory{
        "step/peak-memory/" + setting.place(world),
        "MB",
        {peak_megabytes(setting, true)},
        {peak_megabytes(setting, false)}};
    if (world.rank() == 0) {
      bench::print(memory);
    }
  }
  Trainer sharded(setting, true);
  Trainer plain(setting, false);
  for (int i = 0; i < arguments.times(kWarmUp); ++i) {
    sharded.step();
    plain.step();
  }
  bench::Row row{"step/" + setting.place(world), "ms", {}};
  const int steps = arguments.times(kStepsARepeat);
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    row.ours.push_back(sharded.measure(world, steps));
    row.limit.push_back(plain.measure(world, steps));
  }
  if (world.rank() == 0) {
    bench::print(row);
  }
  return 0;
}
