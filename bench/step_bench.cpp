// One training step of a sharded GPT, compared with the plain one, on the same
// ranks.
//
//   tessera run -n 2 step_bench              # tiny, on the CPU
//   step_bench 124M cuda                     # alone, on a GPU, in bfloat16
//
// The plain model does not communicate: each rank trains its own. It is the
// limit. Steps of the two take turns, a handful at a time. On a GPU the sharded
// model computes in bfloat16 from float32 shards, the plain one has bfloat16
// parameters, and both clip. There each is also captured (CapturedStep), the
// sharded one with casts that are kept: rows step/captured/.
#include <tessera/tessera.h>

#include <c10/core/CachingDeviceAllocator.h>

#include <memory>
#include <string>

#include "harness.h"
#include "setting.h"

namespace {

constexpr int kRepeats = 3; // per round
constexpr int kStepsARepeat = 8;
constexpr int kWarmUp = 4;

using bench::Arguments;
using bench::Setting;

struct Way {
  bool sharded = false;
  bool captured = false;
};

/// A model with its optimizer.
class Trainer {
 public:
  Trainer(const Setting& setting, const Way& way) : setting_(setting) {
    torch::manual_seed(0);
    model_ = bench::Gpt(setting.config);
    model_->to(setting.device);
    if (way.sharded) {
      tessera::FullyShardOptions options;
      if (setting.is_cuda()) {
        options.mp_policy(tessera::MixedPrecisionPolicy()
                              .param_dtype(torch::kBFloat16)
                              .reduce_dtype(torch::kFloat)
                              .keep_cast_shards(way.captured));
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
    const double all = bench::milliseconds(world, [&] {
      for (int i = 0; i < steps; ++i) {
        step();
      }
      bench::synchronize(setting_.device);
    });
    return all / steps;
  }

 private:
  torch::Tensor step_on(const torch::Tensor& ids) {
    const auto loss = bench::loss_of(model_, ids);
    loss.backward();
    if (setting_.is_cuda()) {
      tessera::clip_grad_norm_(model_, 1.0);
    }
    optimizer_->step();
    optimizer_->zero_grad();
    return loss.detach();
  }

  const Setting setting_;
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
  torch::Tensor ids_;
  std::unique_ptr<tessera::CapturedStep> captured_;
};

/// The peak of memory that a model and its training take on a GPU, in
/// megabytes; of a captured step that of its graph, too: what is reserved.
double peak_megabytes(const Setting& setting, const Way& way) {
  torch::empty({1}, setting.device); // there are no figures before first use
  auto* allocator = c10::getDeviceAllocator(torch::kCUDA);
  allocator->emptyCache();
  allocator->resetPeakStats(0);
  {
    Trainer trainer(setting, way);
    for (int i = 0; i < kWarmUp + 2; ++i) {
      trainer.step();
    }
    torch::cuda::synchronize();
  }
  constexpr auto kAll =
      static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator->getDeviceStats(0);
  const auto& bytes =
      way.captured ? stats.reserved_bytes : stats.allocated_bytes;
  return static_cast<double>(bytes[kAll].peak) / 1e6;
}

/// Steps of the sharded model, and of the plain one in turns.
void run(
    const Arguments& arguments,
    const Setting& setting,
    const tessera::Group& world,
    bool captured) {
  const std::string name = captured ? "step/captured/" : "step/";
  const Way ours{.sharded = true, .captured = captured};
  const Way limit{.sharded = false, .captured = captured};
  if (setting.is_cuda()) {
    const bench::Row memory{
        name + "peak-memory/" + setting.place(world),
        "MB",
        {peak_megabytes(setting, ours)},
        {peak_megabytes(setting, limit)}};
    if (world.rank() == 0) {
      bench::print(memory);
    }
  }
  Trainer sharded(setting, ours);
  Trainer plain(setting, limit);
  for (int i = 0; i < arguments.times(kWarmUp); ++i) {
    sharded.step();
    plain.step();
  }
  bench::Row row{name + setting.place(world), "ms", {}};
  const int steps = arguments.times(kStepsARepeat);
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    row.ours.push_back(sharded.measure(world, steps));
    row.limit.push_back(plain.measure(world, steps));
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
  run(arguments, setting, world, /*captured=*/false);
  if (setting.is_cuda()) {
    run(arguments, setting, world, /*captured=*/true);
  }
  return 0;
}
