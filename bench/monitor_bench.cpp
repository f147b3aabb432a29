// What watching a training step costs: the tiny GPT of step_bench, sharded,
// with a StepMonitor and without, step by step in turns. Times are the
// process's own, so that neighbours do not matter.
//
//   tessera run -n 2 monitor_bench
#include <tessera/tessera.h>

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "gpt.h"

namespace {

constexpr int kWarmUp = 6;
constexpr int kRounds = 40;

/// Microseconds that the process has computed for.
double now() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e6 * static_cast<double>(time.tv_sec) +
      1e-3 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Trainer {
 public:
  Trainer() {
    torch::manual_seed(0);
    for (const auto& block : *model_->blocks) {
      tessera::fully_shard(*block);
    }
    tessera::fully_shard(*model_);
    ids_ = torch::randint(
        0, config_.vocabulary, {config_.batch, config_.length}, torch::kLong);
  }

  tessera::StepMonitor make_monitor() {
    return tessera::StepMonitor(*model_, {optimizer()});
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
          tessera::parameters(*model_), 1e-4);
    }
    return *optimizer_;
  }

  const bench::GptConfig config_;
  bench::Gpt model_{config_};
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
  torch::Tensor ids_;
};

void print(const std::string& what, double ours, double limit) {
  std::printf(
      "{\"name\": \"monitor/%s\", \"unit\": \"us\", \"ours\": %.1f, "
      "\"peers\": {}, \"limit\": %.1f, \"repeats\": %d, \"spread\": 0.0}\n",
      what.c_str(),
      ours,
      limit,
      kRounds);
}

} // namespace

int main() {
  const auto world = tessera::init();
  Trainer trainer;
  auto monitor = trainer.make_monitor();
  for (int i = 0; i < kWarmUp; ++i) {
    trainer.step();
  }
  std::vector<double> alone;
  std::vector<double> watched;
  std::vector<double> drawn;
  std::vector<double> calls; // of the monitor itself
  for (int round = 0; round < kRounds; ++round) {
    double start = now();
    trainer.step();
    alone.push_back(now() - start);

    start = now();
    monitor.begin_step();
    const double begun = now() - start;
    trainer.step();
    const double before_end = now();
    (void)monitor.end_step();
    calls.push_back(begun + now() - before_end);
    watched.push_back(now() - start);

    start = now();
    monitor.begin_step(tessera::MonitorOptions().timeline(true));
    trainer.step();
    (void)monitor.end_step();
    drawn.push_back(now() - start);
  }
  if (world.rank() == 0) {
    print(
        "step/gpt-tiny/cpu" + std::to_string(world.size()),
        median(watched),
        median(alone));
    print(
        "timeline/gpt-tiny/cpu" + std::to_string(world.size()),
        median(drawn),
        median(alone));
    print("calls", median(calls), 0);
  }
  return 0;
}
