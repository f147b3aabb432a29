#include <tessera/train/gradient_accumulation.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "engine/module_units.h"
#include "engine/schedule.h"
#include "support/ranks.h"
#include "train/front_ends.h"
#include "train/micro_batches.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests

class AccumulationTest
    : public ::testing::TestWithParam<std::tuple<FrontEnd, Rows>> {};

TEST_P(AccumulationTest, MatchesOneLargeBatch) {
  const auto [kind, rows] = GetParam();
  on_ranks(2, [kind = kind, rows = rows](const Group& world) {
    for (const bool each : {false, true}) {
      SCOPED_TRACE(each ? "sync_each_batch" : "one synchronisation");
      Trained<> trained(kind);
      LargeBatches reference(world.size(), 0.5);
      const auto accumulation = trained.accumulate(GradientAccumulationOptions()
                                                       .steps(kMicro)
                                                       .max_norm(0.5)
                                                       .sync_each_batch(each));
      EXPECT_FALSE(accumulation->grad_norm().has_value());
      for (int step = 0; step < 3; ++step) {
        EXPECT_TRUE(feed(
            *accumulation, trained.model, rows, world.rank(), step, kMicro));
        reference.step(rows, step, kMicro);
        EXPECT_NEAR(
            accumulation->grad_norm().value(), reference.norm, kTolerance);
        expect_same_parameters(trained.model, reference.model, kTolerance);
      }
    }
  });
}

TEST_P(AccumulationTest, FlushMatchesOneSmallerBatch) {
  const auto [kind, rows] = GetParam();
  on_ranks(2, [kind = kind, rows = rows](const Group& world) {
    for (const bool each : {false, true}) {
      Trained<> trained(kind);
      LargeBatches reference(world.size(), 0.5);
      const auto accumulation = trained.accumulate(GradientAccumulationOptions()
                                                       .steps(kMicro)
                                                       .max_norm(0.5)
                                                       .sync_each_batch(each));
      EXPECT_FALSE(accumulation->flush());
      int step = 0;
      for (const int count : {2, kMicro, 1}) {
        const bool stepped =
            feed(*accumulation, trained.model, rows, world.rank(), step, count);
        EXPECT_EQ(stepped, count == kMicro);
        EXPECT_EQ(accumulation->flush(), count != kMicro);
        reference.step(rows, step, count);
        EXPECT_NEAR(
            accumulation->grad_norm().value(), reference.norm, kTolerance);
        expect_same_parameters(trained.model, reference.model, kTolerance);
        ++step;
      }
    }
  });
}

TEST_P(AccumulationTest, WithScalerMatchesOneLargeBatch) {
  const auto [kind, rows] = GetParam();
  on_ranks(2, [kind = kind, rows = rows](const Group& world) {
    Trained<> trained(kind);
    LargeBatches reference(world.size(), 0.5);
    GradScaler scaler(GradScalerOptions().init_scale(1024).growth_interval(2));
    const auto accumulation = trained.accumulate(
        GradientAccumulationOptions().steps(kMicro).max_norm(0.5).scaler(
            scaler));
    for (int step = 0; step < 3; ++step) {
      feed(*accumulation, trained.model, rows, world.rank(), step, kMicro);
      EXPECT_FALSE(accumulation->skipped());
      reference.step(rows, step, kMicro);
      EXPECT_NEAR(
          accumulation->grad_norm().value(), reference.norm, kTolerance);
      expect_same_parameters(trained.model, reference.model, kTolerance);
    }
    EXPECT_EQ(scaler.get_scale(), 2048);

    // One micro-batch of one rank overflows: nobody steps, and the next step
    // is right.
    const auto before = trained.snapshot();
    for (int micro = 0; micro < kMicro; ++micro) {
      const bool overflows = world.rank() == 1 && micro == 1;
      const auto loss =
          loss_of(trained.model, batch_of(2, world.rank(), 9, micro));
      EXPECT_EQ(
          accumulation->backward(
              loss *
              (overflows ? std::numeric_limits<double>::infinity() : 1.0)),
          micro == kMicro - 1);
    }
    EXPECT_TRUE(accumulation->skipped());
    EXPECT_FALSE(std::isfinite(accumulation->grad_norm().value()));
    EXPECT_TRUE(all_equal(trained.snapshot(), before));
    EXPECT_EQ(scaler.get_scale(), 1024);
    feed(*accumulation, trained.model, rows, world.rank(), 3, kMicro);
    reference.step(rows, 3, kMicro);
    expect_same_parameters(trained.model, reference.model, kTolerance);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    AccumulationTest,
    ::testing::Combine(
        ::testing::Values(
            FrontEnd::Flat,
            FrontEnd::Dim0,
            FrontEnd::Ddp,
            FrontEnd::Zero),
        ::testing::Values(Rows::Equal, Rows::Uneven, Rows::Absent)),
    [](const auto& test) {
      return name_of(std::get<0>(test.param)) +
          name_of(std::get<1>(test.param));
    });

TEST(AccumulationPlainTest, MatchesOneLargeBatch) {
  for (const Rows rows : {Rows::Equal, Rows::Uneven}) {
    Stack model = make_stack();
    optim::SGD optimizer(model->parameters(), 0.1);
    LargeBatches reference(1, std::nullopt);
    GradientAccumulation accumulation(
        model, {optimizer}, GradientAccumulationOptions().steps(kMicro));
    int step = 0;
    for (const int count : {kMicro, 2}) {
      feed(accumulation, model, rows, 0, step, count);
      EXPECT_EQ(accumulation.flush(), count != kMicro);
      reference.step(rows, step, count);
      expect_same_parameters(model, reference.model, kTolerance);
      ++step;
    }
    EXPECT_FALSE(accumulation.grad_norm().has_value());
    EXPECT_FALSE(accumulation.skipped());
  }
}

TEST(AccumulationPlainTest, TypicalNumbersChangeWeightsAndNoBit) {
  std::vector<Stack> models;
  for (const double typical : {1.0, 1000.0}) {
    Stack model = models.emplace_back(make_stack());
    optim::SGD optimizer(model->parameters(), 0.1);
    GradientAccumulation accumulation(
        model,
        {optimizer},
        GradientAccumulationOptions().steps(kMicro).typical_samples(typical));
    for (int step = 0; step < 2; ++step) {
      feed(accumulation, model, Rows::Uneven, 0, step, kMicro);
    }
  }
  expect_same_parameters(models[0], models[1], 0);
}

TEST(AccumulationPlainTest, TheFirstLossIsWeightedByTheTypicalNumber) {
  Stack model = make_stack();
  optim::SGD optimizer(model->parameters(), 0.1);
  const auto weight = [&](const GradientAccumulationOptions& options) {
    GradientAccumulation accumulation(model, {optimizer}, options);
    const auto loss = loss_of(model, batch_of(2, 0, 0, 0));
    double found = 0; // the gradient that backward() gives the loss
    loss.register_hook(
        [&](const at::Tensor& grad) { found = grad.item<double>(); });
    accumulation.backward(loss, 4096);
    return found;
  };
  EXPECT_EQ(weight(GradientAccumulationOptions()), 4096);
  EXPECT_EQ(weight(GradientAccumulationOptions().typical_samples(4000)), 1);
}

TEST(AccumulationPlainTest, RanksTrainApart) {
  on_ranks(2, [](const Group& world) {
    Stack model = make_stack();
    optim::SGD optimizer(model->parameters(), 0.1);
    GradientAccumulation accumulation(model, {optimizer});
    // Different numbers of calls: nothing waits for another rank.
    for (int i = 0; i <= world.rank(); ++i) {
      EXPECT_TRUE(accumulation.backward(
          loss_of(model, batch_of(2, world.rank(), i, 0)), 2));
    }
  });
}

TEST(AccumulationRanksTest, RanksOfDdpMayFlushDifferentNumbers) {
  on_ranks(3, [](const Group& world) {
    for (const FrontEnd kind : {FrontEnd::Ddp, FrontEnd::Zero}) {
      Trained<> trained(kind);
      const auto accumulation = trained.accumulate(
          GradientAccumulationOptions().steps(kMicro).max_norm(0.5));
      LargeBatches reference(1, 0.5);
      // Rank 0 has two micro-batches, rank 1 has one, rank 2 has none.
      for (int step = 0; step < 2; ++step) {
        for (int micro = 0; micro < 2 - world.rank(); ++micro) {
          accumulation->backward(
              loss_of(
                  trained.model,
                  batch_of(1 + micro, world.rank(), step, micro)),
              1 + micro);
        }
        EXPECT_TRUE(accumulation->flush());
        Stack& plain = reference.model;
        optim::SGD optimizer(plain->parameters(), 0.1);
        loss_of(
            plain,
            torch::cat(
                {batch_of(1, 0, step, 0),
                 batch_of(2, 0, step, 1),
                 batch_of(1, 1, step, 0)}))
            .backward();
        torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
        optimizer.step();
        optimizer.zero_grad();
        expect_same_parameters(trained.model, plain, kTolerance);
      }
      // The next whole step is a whole step.
      EXPECT_TRUE(feed(
          *accumulation, trained.model, Rows::Equal, world.rank(), 5, kMicro));
    }
  });
}

/// Reductions of all units while `body` runs.
int64_t reductions_in(Stack& model, const std::function<void()>& body) {
  auto& counts =
      engine::units_in(*model).front()->schedule().probe_for_tests().counts;
  const int64_t before = counts.reductions;
  body();
  return counts.reductions - before;
}

TEST(AccumulationRanksTest, IssuesExactlyOneReductionPerUnitAndStep) {
  on_ranks(2, [](const Group& world) {
    const int64_t units = kDepth + 1;
    for (const bool each : {false, true}) {
      Trained<> trained(FrontEnd::Dim0);
      const auto accumulation = trained.accumulate(
          GradientAccumulationOptions().steps(kMicro).sync_each_batch(each));
      const auto run = [&](int count) {
        return reductions_in(trained.model, [&] {
          feed(
              *accumulation,
              trained.model,
              Rows::Uneven,
              world.rank(),
              0,
              count);
          accumulation->flush();
        });
      };
      EXPECT_EQ(run(kMicro), each ? kMicro * units : units);
      EXPECT_EQ(run(2), each ? 2 * units : units);
    }
  });
}

TEST(AccumulationRanksTest, FlushLeavesUnusedParametersAlone) {
  on_ranks(2, [](const Group& world) {
    for (const FrontEnd kind : {FrontEnd::Dim0, FrontEnd::Ddp}) {
      Stack model = make_stack();
      std::unique_ptr<DistributedDataParallel<StackImpl>> ddp;
      if (kind == FrontEnd::Ddp) {
        ddp = std::make_unique<DistributedDataParallel<StackImpl>>(
            model.ptr(), DDPOptions().find_unused_parameters(true));
      } else {
        shard_blocks(model, FullyShardOptions().layout(ShardLayout::Dim0));
      }
      // Momentum without a gradient would not matter, weight decay would.
      optim::AdamW optimizer(
          parameters(model), optim::AdamWOptions(0.1).weight_decay(0.5));
      const OptimizerRefs refs{optimizer};
      const auto options = GradientAccumulationOptions().steps(2);
      const auto accumulation = ddp
          ? std::make_unique<GradientAccumulation>(*ddp, refs, options)
          : std::make_unique<GradientAccumulation>(model, refs, options);
      const at::Tensor before = [&] {
        const torch::NoGradGuard no_grad;
        return model->head.clone();
      }();
      accumulation->backward(
          model->embed->forward(tokens(world.rank(), 0)).square().mean(), 2);
      EXPECT_TRUE(accumulation->flush());
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(torch::equal(model->head + 0, before)) << kind;
    }
  });
}

} // namespace
} // namespace tessera
