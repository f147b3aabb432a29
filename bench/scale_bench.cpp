// What a rank pays for the number of ranks: set-up, a step, and memory, in a
// world of any size whose other ranks are not there. Times are what the process
// computes, so that neighbours do not matter.
//
//   scale_bench 16384 dim0      # 16,384 ranks, parameters cut on dim 0
//   scale_bench 8 flat
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <malloc.h>

#include <ctime>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "gpt.h"
#include "harness.h"
#include "setting.h"

namespace {

constexpr int kRepeats = 5;

/// Few tokens: the plain model computes little, so that what is left is the
/// framework's.
constexpr bench::GptConfig kConfig{
    .vocabulary = 256,
    .width = 256,
    .heads = 4,
    .layers = 24,
    .length = 8,
    .batch = 1};

tessera::ShardLayout layout_of(const std::string& name) {
  if (name == "flat") {
    return tessera::ShardLayout::Flat;
  }
  if (name == "dim0") {
    return tessera::ShardLayout::Dim0;
  }
  throw std::invalid_argument("there is no layout " + name);
}

/// Milliseconds that this process computes while `body` runs.
double computed(const std::function<void()>& body) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 +
        static_cast<double>(time.tv_nsec) / 1e6;
  };
  const double start = now();
  body();
  return now() - start;
}

/// Built without memory, then cut parameter by parameter, or whole.
class Trainer {
 public:
  explicit Trainer(const tessera::FullyShardOptions* options) {
    tessera::seed(0);
    {
      const tessera::DeferredInit deferred;
      model_ = bench::Gpt(kConfig);
    }
    if (options == nullptr) {
      tessera::materialize(model_);
      return;
    }
    for (const auto& block : *model_->blocks) {
      tessera::fully_shard(block, *options);
    }
    tessera::fully_shard(model_, *options);
  }

  /// Forward and backward. Without an optimizer, whose work is a share of the
  /// parameters and not the framework's.
  void step(const torch::Tensor& ids) {
    bench::loss_of(model_, ids).backward();
    for (const torch::Tensor& param : tessera::parameters(model_)) {
      param.mutable_grad().reset();
    }
  }

 private:
  bench::Gpt model_ = nullptr;
};

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const std::string world_size = arguments.word(0, "8");
  const std::string layout = arguments.word(1, "flat");
  const auto options = tessera::FullyShardOptions().layout(layout_of(layout));
  at::set_num_threads(1);
  mallopt(M_MMAP_THRESHOLD, 1 << 16); // what is freed is given back
  // Rank 0, which no rank has more of a parameter than.
  const auto world = tessera::init(tessera::InitOptions()
                                       .backend("fake")
                                       .rank(0)
                                       .world_size(std::stoi(world_size))
                                       .local_rank(0));
  const auto row = [&](const char* what, const char* unit) {
    return bench::Row{
        "scale/" + std::string(what) + "/" + layout + "/w" + world_size,
        unit,
        {}};
  };
  const auto ids = torch::randint(
      0, kConfig.vocabulary, {kConfig.batch, kConfig.length}, torch::kLong);

  bench::Row setup = row("setup", "ms");
  bench::Row memory = row("memory", "MB");
  std::unique_ptr<Trainer> sharded;
  memory.ours.push_back(bench::extra_megabytes([&] {
    setup.ours.push_back(
        computed([&] { sharded = std::make_unique<Trainer>(&options); }));
    sharded->step(ids); // compares what ranks begin with
    sharded->step(ids); // gathers ahead
  }));
  std::unique_ptr<Trainer> plain;
  setup.limit.push_back(
      computed([&] { plain = std::make_unique<Trainer>(nullptr); }));
  plain->step(ids);

  bench::Row step = row("step", "ms");
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    step.ours.push_back(computed([&] { sharded->step(ids); }));
    step.limit.push_back(computed([&] { plain->step(ids); }));
  }
  bench::print(setup);
  bench::print(step);
  bench::print(memory);
  return 0;
}
