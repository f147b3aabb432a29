// Schedules over ranks: one decision for all, ZeRO, and checkpoints.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/init.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/train/training_state.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <gmock/gmock.h>

#include "checkpoint/support.h"
#include "optim/lr_cases.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::testing {
namespace {

using namespace tessera::optim; // NOLINT: the subject of these tests
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::unique_ptr<SGD> make_sgd_of_rank(double lr) {
  return std::make_unique<SGD>(
      std::vector<at::Tensor>{torch::zeros({1}, torch::requires_grad())}, lr);
}

TEST(LrSchedulerRanksTest, PlateauDecidesByTheMeanOfTheRanks) {
  on_ranks(4, [](const Group& world) {
    const auto optimizer = make_sgd_of_rank(0.8);
    ReduceLROnPlateau schedule(
        *optimizer, ReduceLROnPlateauOptions().factor(0.5).patience(0));
    // Rank 0 gets worse by itself, the mean gets better.
    const bool first = world.rank() == 0;
    schedule.step(first ? 1.0 : 4.0);
    EXPECT_EQ(schedule.best(), 3.25);
    schedule.step(first ? 2.0 : 1.0);
    EXPECT_EQ(schedule.best(), 1.25);
    EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.8));
    // And the other way round.
    schedule.step(first ? 0.5 : 3.0);
    EXPECT_EQ(schedule.best(), 1.25);
    EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.4));
  });
}

TEST(LrSchedulerRanksTest, PlateauRejectsMetricsThatDifferIfAsked) {
  on_ranks(2, [](const Group& world) {
    const auto optimizer = make_sgd_of_rank(0.8);
    ReduceLROnPlateau schedule(
        *optimizer, ReduceLROnPlateauOptions().rank_metrics(RankMetrics::Same));
    schedule.step(2.0);
    EXPECT_THROW(
        schedule.step(world.rank() == 0 ? 1.0 : 1.5), DisagreementError);
    EXPECT_EQ(schedule.last_epoch(), 1);
    EXPECT_EQ(schedule.best(), 2.0);
    EXPECT_THAT(
        error_of([&] { schedule.step(world.rank() == 0 ? 1.0 : 1.5); }),
        HasSubstr("ranks pass different metrics: 1, 1.5, by rank."));
  });
}

TEST(LrSchedulerRanksTest, PlateauLooksAtItsGroupAlone) {
  on_ranks(2, [](const Group& world) {
    const auto optimizer = make_sgd_of_rank(0.8);
    ReduceLROnPlateau schedule(
        *optimizer, ReduceLROnPlateauOptions().group(world.alone()));
    schedule.step(world.rank() == 0 ? 1.0 : 5.0);
    EXPECT_EQ(schedule.best(), world.rank() == 0 ? 1.0 : 5.0);
  });
}

/// Parameters after some scheduled steps, with gradients of the step's number.
template <class Optimizer>
std::vector<at::Tensor> train(
    const std::vector<at::Tensor>& params,
    Optimizer& optimizer) {
  SequentialLR schedule(
      optimizer,
      {std::make_shared<LinearLR>(optimizer),
       std::make_shared<OneCycleLR>(
           optimizer, OneCycleLROptions(0.3).total_steps(20))},
      {3});
  for (int step = 1; step <= 8; ++step) {
    for (const at::Tensor& param : params) {
      param.mutable_grad() = torch::full_like(param, step) + param.detach();
    }
    optimizer.step();
    schedule.step();
  }
  std::vector<at::Tensor> values;
  for (const at::Tensor& param : params) {
    values.push_back(param.detach().clone());
  }
  return values;
}

template <class Inner, class Options>
void check_zero(const Options& options) {
  const auto make = [] {
    torch::manual_seed(3);
    std::vector<at::Tensor> params;
    for (const int64_t size : {5, 3, 2}) {
      params.push_back(torch::randn({size}).requires_grad_());
    }
    return params;
  };
  const auto plain = make();
  Inner alone(plain, options);
  const auto expected = train(plain, alone);
  const auto owned = make();
  ZeroRedundancyOptimizer zero(owned, optimizer_class<Inner>(options));
  const auto actual = train(owned, zero);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << i;
  }
  zero.step(); // takes the options that the schedule changed
  EXPECT_EQ(
      zero.optim().param_groups()[0].options().get_lr(),
      zero.param_groups()[0].options().get_lr());
}

TEST(LrSchedulerRanksTest, DrivesZeroAsItsInnerOptimizer) {
  on_ranks(2, [](const Group&) {
    check_zero<SGD>(SGDOptions(0.1).momentum(0.9));
    check_zero<AdamW>(AdamWOptions(0.1));
    check_zero<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  });
}

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(6, 8));
    second = register_module("second", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(torch::relu(first(x)));
  }
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
};

/// A run with schedules, which are saved with the rest of it.
struct ScheduledRun {
  explicit ScheduledRun(uint64_t seed) {
    torch::manual_seed(seed);
    net = std::make_shared<Net>();
    fully_shard(*net);
    optimizer = std::make_unique<AdamW>(parameters(*net), 0.05);
    schedule = std::make_unique<SequentialLR>(
        *optimizer,
        std::vector<std::shared_ptr<EpochSchedule>>{
            std::make_shared<LinearLR>(
                *optimizer, LinearLROptions().total_iters(3)),
            std::make_shared<MultiStepLR>(
                *optimizer, MultiStepLROptions({1, 1, 4}).gamma(0.7))},
        std::vector<int64_t>{3});
    plateau = std::make_unique<ReduceLROnPlateau>(
        *optimizer, ReduceLROnPlateauOptions().patience(1).factor(0.5));
    training = std::make_unique<TrainingState>(*net, OptimizerRefs{*optimizer});
  }

  std::vector<double> steps(int first, int count) {
    std::vector<double> seen;
    for (int step = first; step < first + count; ++step) {
      torch::manual_seed(step);
      optimizer->zero_grad();
      const at::Tensor loss =
          net->forward(torch::randn({4, 6})).square().mean();
      loss.backward();
      optimizer->step();
      schedule->step();
      plateau->step(1.0 + step);
      seen.push_back(loss.item<double>());
      seen.push_back(optimizer->param_groups()[0].options().get_lr());
    }
    return seen;
  }

  TrainingState& state() {
    training->values.set("schedule", schedule->state_dict());
    training->values.set("plateau", plateau->state_dict());
    return *training;
  }

  void load(const std::filesystem::path& folder) {
    checkpoint::load(state(), folder);
    schedule->load_state_dict(training->values.at("schedule").dict());
    plateau->load_state_dict(training->values.at("plateau").dict());
  }

  std::shared_ptr<Net> net;
  std::unique_ptr<AdamW> optimizer;
  std::unique_ptr<SequentialLR> schedule;
  std::unique_ptr<ReduceLROnPlateau> plateau;
  std::unique_ptr<TrainingState> training;
};

TEST(LrSchedulerRanksTest, ARunGoesOnFromACheckpointBitByBit) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    ScheduledRun run(1);
    run.steps(0, 5);
    checkpoint::save(run.state(), folder / "c");
    checkpoint::save(*run.schedule, folder / "s");
    const auto expected = run.steps(5, 5);

    ScheduledRun other(2);
    other.load(folder / "c");
    EXPECT_EQ(other.schedule->last_epoch(), 5);
    EXPECT_EQ(other.plateau->best(), 1.0);
    EXPECT_EQ(other.steps(5, 5), expected);

    checkpoint::load(*other.schedule, folder / "s"); // a Stateful
    EXPECT_EQ(other.schedule->last_epoch(), 5);
  });
}

// initial_lr is in the param groups of a run with a schedule only.
TEST(LrSchedulerRanksTest, ARunMayBeginAndEndToHaveASchedule) {
  const TempFolder folder;
  torch::nn::Linear model(2, 2);
  SGD optimizer(model->parameters(), 0.5);
  TrainingState training(model, {optimizer});
  checkpoint::save(training, folder / "without");
  {
    StepLR schedule(optimizer, StepLROptions(1));
    checkpoint::load(training, folder / "without");
    schedule.step();
    EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.05));
    checkpoint::save(training, folder / "with");
  }
  torch::nn::Linear other(2, 2);
  SGD fresh(other->parameters(), 0.5);
  TrainingState resumed(other, {fresh});
  checkpoint::load(resumed, folder / "with");
  EXPECT_EQ(fresh.param_groups()[0].options().get_lr(), 0.05);
}

} // namespace
} // namespace tessera::testing
