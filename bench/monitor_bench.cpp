// What watching a training step costs: the tiny GPT of step_bench, sharded,
// with and without a StepMonitor, taking turns step by step. Times are the
// process's own, so that neighbours do not matter.
//
//   tessera run -n 2 monitor_bench
#include <tessera/tessera.h>

#include <time.h>

#include <memory>
#include <string>

#include "gpt.h"
#include "harness.h"

namespace {

constexpr int kWarmUp = 6;
constexpr int kRounds = 40;

/// Milliseconds that the process has computed for.
double now() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) +
      1e-6 * static_cast<double>(time.tv_nsec);
}

class Trainer {
 public:
  Trainer() {
    torch::manual_seed(0);
    model_ = bench::Gpt(config_);
    for (const auto& block : *model_->blocks) {
      tessera::fully_shard(block);
    }
    tessera::fully_shard(model_);
    ids_ = torch::randint(
        0, config_.vocabulary, {config_.batch, config_.length}, torch::kLong);
  }

  tessera::StepMonitor make_monitor() {
    return tessera::StepMonitor(model_, {optimizer()});
  }

  void step() {
    const auto logits = model_->forward(ids_);
    torch::cross_entropy_loss(
        logits.view({-1, logits.size(-1)}), ids_.view({-1}))
        .backward();
    optimizer().step();
    optimizer().zero_grad();
  }

 private:
  tessera::optim::AdamW& optimizer() {
    if (!optimizer_) {
      optimizer_ = std::make_unique<tessera::optim::AdamW>(
          tessera::parameters(model_), 1e-4);
    }
    return *optimizer_;
  }

  const bench::GptConfig config_;
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
  torch::Tensor ids_;
};

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const auto world = tessera::init();
  Trainer trainer;
  auto monitor = trainer.make_monitor();
  for (int i = 0; i < arguments.times(kWarmUp); ++i) {
    trainer.step();
  }
  bench::Samples alone;
  bench::Samples watched;
  bench::Samples drawn;
  for (int round = 0; round < arguments.times(kRounds); ++round) {
    double start = now();
    trainer.step();
    alone.push_back(now() - start);

    start = now();
    monitor.begin_step();
    trainer.step();
    (void)monitor.end_step();
    watched.push_back(now() - start);

    start = now();
    monitor.begin_step(tessera::MonitorOptions().timeline(true));
    trainer.step();
    (void)monitor.end_step();
    drawn.push_back(now() - start);
  }
  if (world.rank() == 0) {
    const std::string where = "gpt-tiny/cpu" + std::to_string(world.size());
    bench::print(
        {.name = "monitor/step/" + where,
         .unit = "ms",
         .ours = watched,
         .limit = alone});
    bench::print(
        {.name = "monitor/timeline/" + where,
         .unit = "ms",
         .ours = drawn,
         .limit = alone});
  }
  return 0;
}
