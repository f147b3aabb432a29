// What schedules refuse, what they leave alone, and how a program uses them.
#include <tessera/optim/named_optimizer.h>

#include <gmock/gmock.h>

#include "optim/lr_cases.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::testing {
namespace {

using namespace tessera::optim; // NOLINT: the subject of these tests
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

double lr_of(torch::optim::Optimizer& optimizer, size_t group = 0) {
  return optimizer.param_groups()[group].options().get_lr();
}

torch::optim::OptimizerParamGroup new_group(double lr) {
  return {
      {torch::zeros({1}, torch::requires_grad())},
      std::make_unique<SGDOptions>(lr)};
}

std::unique_ptr<SGD> make_sgd(double lr = 0.1) {
  return std::make_unique<SGD>(
      std::vector<torch::optim::OptimizerParamGroup>{new_group(lr)},
      SGDOptions(lr).momentum(0.9));
}

TEST(LrSchedulerTest, ConstructionSetsTheFirstLearningRate) {
  const auto optimizer = make_sgd(0.5);
  LinearLR schedule(
      *optimizer, LinearLROptions().start_factor(0.1).total_iters(4));
  EXPECT_THAT(lr_of(*optimizer), DoubleEq(0.05));
  EXPECT_EQ(schedule.last_epoch(), 0);
  EXPECT_THAT(schedule.base_lrs(), ElementsAre(0.5));
  EXPECT_EQ(&schedule.optimizer(), optimizer.get());
}

TEST(LrSchedulerTest, InitialLrIsInTheOptimizersDictionary) {
  const auto optimizer = make_sgd(0.5);
  ExponentialLR schedule(*optimizer, 0.5);
  schedule.step();
  const StateDict dict = optimizer->state_dict();
  EXPECT_EQ(dict.at_path("param_groups.0.initial_lr").to_double(), 0.5);
  EXPECT_EQ(dict.at_path("param_groups.0.lr").to_double(), 0.25);

  const auto other = make_sgd(7);
  other->load_state_dict(dict);
  ExponentialLR resumed(*other, ExponentialLROptions(0.5).last_epoch(0));
  EXPECT_EQ(lr_of(*other), 0.25); // the next step is the second one
  EXPECT_THAT(resumed.base_lrs(), ElementsAre(0.5));
}

TEST(LrSchedulerTest, SchedulesOfALibTorchOptimizerShareInitialLr) {
  torch::optim::SGD optimizer({torch::zeros({1}, torch::requires_grad())}, 0.4);
  {
    ConstantLR first(optimizer, ConstantLROptions().factor(0.5));
    ExponentialLR second(optimizer, 0.5);
    EXPECT_THAT(second.base_lrs(), ElementsAre(0.4));
  }
  // Nothing of the first two is left.
  ExponentialLR third(optimizer, 0.5);
  EXPECT_THAT(third.base_lrs(), ElementsAre(0.2));
}

TEST(LrSchedulerTest, GroupsThatAreAddedLaterAreScheduledFromTheirOwnRate) {
  const auto optimizer = make_sgd(0.8);
  ExponentialLR schedule(*optimizer, 0.5);
  schedule.step();
  optimizer->add_param_group(new_group(0.1));
  schedule.step();
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.2, 0.05));
}

TEST(LrSchedulerTest, ReplacesNothingIfAnAddedGroupHasNoBaseRate) {
  const auto optimizer = make_sgd(0.8);
  CosineAnnealingWarmRestarts restarts(*optimizer, 4);
  LambdaLR lambda(*optimizer, [](int64_t) { return 1.0; });
  OneCycleLR cycle(*optimizer, OneCycleLROptions(1.0).total_steps(5));
  const auto before = optimizer->state_dict();
  optimizer->add_param_group(new_group(0.1));
  for (LRScheduler* schedule :
       std::vector<LRScheduler*>{&restarts, &lambda, &cycle}) {
    const StateDict state = schedule->state_dict();
    EXPECT_THAT(
        error_of([&] { schedule->step(); }), HasSubstr("Make a new schedule"))
        << schedule->name();
    EXPECT_EQ(diff_state_dicts(schedule->state_dict(), state), "");
  }
  EXPECT_EQ(lr_of(*optimizer), before.at_path("param_groups.0.lr").to_double());
  EXPECT_EQ(lr_of(*optimizer, 1), 0.1);
}

TEST(LrSchedulerTest, RejectsSettingsOutOfRange) {
  const auto optimizer = make_sgd();
  const auto error = [&](const std::function<void()>& make) {
    const std::string text = error_of(make);
    EXPECT_EQ(lr_of(*optimizer), 0.1);
    return text;
  };
  using ::testing::StartsWith;
  EXPECT_THAT(
      error([&] { StepLR(*optimizer, 0); }),
      StartsWith("[StepLR] step_size is 0, must be above 0."));
  EXPECT_THAT(
      error([&] { ConstantLR(*optimizer, ConstantLROptions().factor(1.5)); }),
      StartsWith("[ConstantLR] factor is 1.5, must be from 0 to 1."));
  EXPECT_THAT(
      error([&] { LinearLR(*optimizer, LinearLROptions().start_factor(0)); }),
      StartsWith("[LinearLR] start_factor is 0"));
  EXPECT_THAT(
      error([&] { LinearLR(*optimizer, LinearLROptions().end_factor(2)); }),
      StartsWith("[LinearLR] end_factor is 2"));
  EXPECT_THAT(
      error([&] { CosineAnnealingLR(*optimizer, 0); }),
      StartsWith("[CosineAnnealingLR] T_max is 0"));
  EXPECT_THAT(
      error([&] { CosineAnnealingWarmRestarts(*optimizer, 0); }),
      StartsWith("[CosineAnnealingWarmRestarts] T_0 is 0"));
  EXPECT_THAT(
      error([&] { OneCycleLR(*optimizer, OneCycleLROptions(0.1)); }),
      StartsWith("[OneCycleLR] the number of steps is not given."));
  EXPECT_THAT(
      error([&] {
        OneCycleLR(*optimizer, OneCycleLROptions({0.1, 0.2}).total_steps(5));
      }),
      StartsWith("[OneCycleLR] max_lr has 2 values, the optimizer has 1"));
  EXPECT_THAT(
      error([&] { LambdaLR(*optimizer, std::vector<LRLambda>{nullptr}); }),
      StartsWith("[LambdaLR] a function is empty."));
  EXPECT_THAT(
      error([&] {
        ReduceLROnPlateau(*optimizer, ReduceLROnPlateauOptions().factor(1));
      }),
      StartsWith("[ReduceLROnPlateau] factor is 1, must be below 1."));
  EXPECT_THAT(
      error([&] { StepLR(*optimizer, StepLROptions(3).last_epoch(4)); }),
      StartsWith(
          "[StepLR] last_epoch is 4, but param group 0 has no \"initial_lr\""));
}

TEST(LrSchedulerTest, RejectsMomentumWhereThereIsNone) {
  torch::optim::Adagrad optimizer(
      {torch::zeros({1}, torch::requires_grad())}, 0.4);
  EXPECT_THAT(
      error_of([&] {
        OneCycleLR(optimizer, OneCycleLROptions(1.0).total_steps(5));
      }),
      HasSubstr("neither momentum nor betas"));
}

TEST(LrSchedulerTest, RejectsRatesThatAreNotFinite) {
  const auto optimizer = make_sgd();
  ConstantLR schedule(*optimizer, ConstantLROptions().factor(0).total_iters(2));
  schedule.step();
  EXPECT_THAT(
      error_of([&] { schedule.step(); }),
      HasSubstr("the learning rate of param group 0 would be"));
  EXPECT_EQ(lr_of(*optimizer), 0);
  EXPECT_EQ(schedule.last_epoch(), 1);
}

TEST(LrSchedulerTest, OneCycleEndsWithItsSteps) {
  const auto optimizer = make_sgd();
  OneCycleLR schedule(*optimizer, OneCycleLROptions(0.1).total_steps(3));
  for (int i = 0; i < 3; ++i) {
    schedule.step();
  }
  const double last = lr_of(*optimizer);
  EXPECT_THAT(
      error_of([&] { schedule.step(); }),
      HasSubstr("the cycle has 3 steps and was to be stepped 4 times."));
  EXPECT_EQ(schedule.last_epoch(), 3);
  EXPECT_EQ(lr_of(*optimizer), last);
}

TEST(LrSchedulerTest, SequenceRejectsWhatDoesNotFitTogether) {
  const auto optimizer = make_sgd();
  const auto other = make_sgd();
  const auto part = [&](SGD& owner) {
    return std::make_shared<ExponentialLR>(owner, 0.9);
  };
  using Parts = std::vector<std::shared_ptr<EpochSchedule>>;
  EXPECT_THAT(
      error_of([&] { SequentialLR(*optimizer, {}, {}); }),
      HasSubstr("there is no schedule"));
  EXPECT_THAT(
      error_of([&] {
        SequentialLR(*optimizer, Parts{part(*optimizer), part(*other)}, {3});
      }),
      HasSubstr("schedule 1, a ExponentialLR, belongs to another optimizer"));
  EXPECT_THAT(
      error_of([&] {
        SequentialLR(
            *optimizer, Parts{part(*optimizer), part(*optimizer)}, {3, 4});
      }),
      HasSubstr("there are 2 milestones for 2 schedules"));
  EXPECT_THAT(
      error_of([&] {
        SequentialLR(
            *optimizer,
            Parts{part(*optimizer), part(*optimizer), part(*optimizer)},
            {5, 4});
      }),
      HasSubstr("in order"));
}

TEST(LrSchedulerTest, LoadingRejectsOtherDictionariesAndChangesNothing) {
  const auto optimizer = make_sgd();
  SequentialLR schedule(
      *optimizer,
      {std::make_shared<LinearLR>(*optimizer),
       std::make_shared<CosineAnnealingLR>(*optimizer, 10)},
      {5});
  schedule.step();
  const StateDict before = schedule.state_dict();

  StateDict changed = before.clone();
  changed.at("_schedulers").list()[0].dict().set("total_iters", 99);
  changed.at("_schedulers").list()[1].dict().erase("T_max");
  EXPECT_THAT(
      error_of([&] { schedule.load_state_dict(changed); }),
      HasSubstr("[CosineAnnealingLR] the dictionary has no \"T_max\""));
  EXPECT_EQ(diff_state_dicts(schedule.state_dict(), before), "");

  changed = before.clone();
  changed.set("gamma", 0.1);
  EXPECT_THAT(
      error_of([&] { schedule.load_state_dict(changed); }),
      HasSubstr("the key \"gamma\", which this schedule does not have"));
  changed = before.clone();
  changed.at("_schedulers").list()[1].dict().set("T_max", "long");
  EXPECT_THROW(schedule.load_state_dict(changed), c10::TypeError);
  EXPECT_EQ(diff_state_dicts(schedule.state_dict(), before), "");
}

TEST(LrSchedulerTest, LoadingRejectsSettingsOutOfRange) {
  const auto optimizer = make_sgd();
  StepLR steps(*optimizer, 3);
  CosineAnnealingLR cosine(*optimizer, 3);
  CosineAnnealingWarmRestarts restarts(*optimizer, 3);
  const std::vector<std::pair<LRScheduler*, const char*>> cases{
      {&steps, "step_size"},
      {&cosine, "T_max"},
      {&restarts, "T_0"},
      {&restarts, "T_i"}};
  for (const auto& [schedule, key] : cases) {
    const StateDict before = schedule->state_dict();
    StateDict changed = before;
    changed.set(key, 0);
    EXPECT_THAT(
        error_of([&, &one = *schedule] { one.load_state_dict(changed); }),
        HasSubstr(std::string(key) + " is 0, must be above 0."));
    EXPECT_EQ(diff_state_dicts(schedule->state_dict(), before), "");
    schedule->step();
  }
}

TEST(LrSchedulerTest, LoadingReplacesSettings) {
  const auto optimizer = make_sgd(0.8);
  MultiStepLR saved(*optimizer, MultiStepLROptions({2, 2, 7}).gamma(0.5));
  saved.step();
  const auto other = make_sgd(0.8);
  MultiStepLR loaded(*other, {100});
  loaded.load_state_dict(saved.state_dict());
  loaded.step();
  EXPECT_EQ(lr_of(*other), 0.2);
}

TEST(LrSchedulerTest, PlateauTakesUpGroupsThatAreAddedLater) {
  const auto optimizer = make_sgd(0.8);
  ReduceLROnPlateau schedule(
      *optimizer,
      ReduceLROnPlateauOptions().factor(0.5).patience(0).min_lr(0.3));
  ReduceLROnPlateau listed(
      *optimizer, ReduceLROnPlateauOptions().patience(0).min_lr({0.3}));
  optimizer->add_param_group(new_group(0.5));
  schedule.step(1.0);
  schedule.step(1.0);
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.4, 0.3));
  listed.step(1.0);
  EXPECT_THAT(
      error_of([&] { listed.step(1.0); }),
      HasSubstr("min_lr has 1 values, the optimizer has 2 param groups"));
  EXPECT_EQ(listed.last_epoch(), 1);
}

TEST(LrSchedulerTest, DrivesANamedOptimizer) {
  const at::Tensor param = torch::ones({1}, torch::requires_grad());
  NamedOptimizer optimizer(
      {{"w", param}},
      std::make_unique<SGD>(std::vector<at::Tensor>{param}, 1.0));
  StepLR schedule(optimizer, StepLROptions(1).gamma(0.5));
  for (int i = 0; i < 2; ++i) {
    param.mutable_grad() = torch::ones({1});
    optimizer.step();
    schedule.step();
  }
  EXPECT_EQ(param.item<double>(), 1 - 1 - 0.5);
  EXPECT_EQ(
      optimizer.state_dict().at_path("param_groups.0.initial_lr").to_double(),
      1);
}

/// The schedule that a trainer of GPTs writes by hand.
double by_hand(int64_t step, int64_t warmup, int64_t steps, double low) {
  if (step < warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  const double share =
      static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
  return low + (1 - low) * 0.5 * (1 + std::cos(M_PI * share));
}

TEST(LrSchedulerTest, WarmUpAndCosineAreTheTrainersSchedule) {
  constexpr int64_t kWarmup = 12;
  constexpr int64_t kSteps = 150;
  const auto optimizer = make_sgd(1);
  const auto other = make_sgd(1);
  SequentialLR schedule(
      *optimizer,
      {std::make_shared<LinearLR>(
           *optimizer,
           LinearLROptions()
               .start_factor(1.0 / kWarmup)
               .total_iters(kWarmup - 1)),
       std::make_shared<CosineAnnealingLR>(
           *optimizer,
           CosineAnnealingLROptions(kSteps - kWarmup).eta_min(0.1))},
      {kWarmup});
  LambdaLR lambda(
      *other, [](int64_t step) { return by_hand(step, kWarmup, kSteps, 0.1); });
  for (int64_t step = 0; step < kSteps; ++step) {
    const double expected = by_hand(step, kWarmup, kSteps, 0.1);
    EXPECT_NEAR(lr_of(*optimizer), expected, 1e-13) << step;
    EXPECT_EQ(lr_of(*other), expected) << step;
    schedule.step();
    lambda.step();
  }
}

} // namespace
} // namespace tessera::testing
