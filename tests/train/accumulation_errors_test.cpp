// Accumulations that end early, and those that are refused.
#include <tessera/train/gradient_accumulation.h>

#include <cmath>

#include "support/errors.h"
#include "support/ranks.h"
#include "train/front_ends.h"
#include "train/micro_batches.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(AccumulationErrorsTest, DiscardBeginsAnew) {
  on_ranks(2, [](const Group& world) {
    for (const FrontEnd kind : {FrontEnd::Flat, FrontEnd::Ddp}) {
      Trained<> trained(kind);
      LargeBatches reference(world.size(), std::nullopt);
      const auto accumulation =
          trained.accumulate(GradientAccumulationOptions().steps(kMicro));
      feed(*accumulation, trained.model, Rows::Uneven, world.rank(), 7, 2);
      accumulation->discard();
      EXPECT_EQ(accumulation->num_pending(), 0);
      EXPECT_FALSE(accumulation->flush());
      feed(*accumulation, trained.model, Rows::Uneven, world.rank(), 0, kMicro);
      reference.step(Rows::Uneven, 0, kMicro);
      expect_same_parameters(trained.model, reference.model, kTolerance);
    }
  });
}

TEST(AccumulationErrorsTest, EndTurnsSynchronisationOn) {
  on_ranks(2, [](const Group& world) {
    for (const FrontEnd kind : {FrontEnd::Flat, FrontEnd::Ddp}) {
      Trained<> trained(kind);
      trained.accumulate(GradientAccumulationOptions().steps(kMicro)).reset();
      LargeBatches reference(world.size(), std::nullopt);
      loss_of(trained.model, batch_of(2, world.rank(), 0, 0)).backward();
      trained.optimizer->step();
      reference.step(Rows::Equal, 0, 1);
      expect_same_parameters(trained.model, reference.model, kTolerance);
    }
  });
}

TEST(AccumulationErrorsTest, RejectsNonfiniteNormsIfAsked) {
  on_ranks(2, [](const Group& world) {
    for (const FrontEnd kind : {FrontEnd::Dim0, FrontEnd::Ddp}) {
      Trained<> trained(kind);
      LargeBatches reference(world.size(), 0.5);
      const auto accumulation =
          trained.accumulate(GradientAccumulationOptions()
                                 .steps(kMicro)
                                 .max_norm(0.5)
                                 .error_if_nonfinite(true));
      const auto before = trained.snapshot();
      const auto text = error_of([&] {
        for (int micro = 0; micro < kMicro; ++micro) {
          const auto loss =
              loss_of(trained.model, batch_of(2, world.rank(), 0, micro));
          accumulation->backward(world.rank() == 1 ? loss * NAN : loss, 2);
        }
      });
      EXPECT_THAT(text, HasSubstr("nan, so the step was not made"));
      EXPECT_TRUE(all_equal(trained.snapshot(), before));
      feed(*accumulation, trained.model, Rows::Equal, world.rank(), 0, kMicro);
      reference.step(Rows::Equal, 0, kMicro);
      expect_same_parameters(trained.model, reference.model, kTolerance);
    }
  });
}

TEST(AccumulationErrorsTest, RejectsOptionsOnEveryRank) {
  on_ranks(2, [](const Group& world) {
    Trained<> trained(FrontEnd::Dim0);
    GradScaler scaler;
    const auto error = [&](const GradientAccumulationOptions& options) {
      return error_of([&] { trained.accumulate(options); });
    };
    EXPECT_THAT(
        error(GradientAccumulationOptions().steps(world.rank())),
        HasSubstr("steps is 0; expected 1 or more"));
    EXPECT_THAT(
        error(GradientAccumulationOptions().steps(1 + world.rank())),
        AllOf(HasSubstr("steps 1"), HasSubstr("steps 2")));
    EXPECT_THAT(
        error(GradientAccumulationOptions().max_norm(0)),
        HasSubstr("max_norm is 0"));
    EXPECT_THAT(
        error(GradientAccumulationOptions().typical_samples(0)),
        HasSubstr("typical_samples is 0"));
    EXPECT_THAT(
        error(GradientAccumulationOptions().error_if_nonfinite(true)),
        HasSubstr("error_if_nonfinite needs max_norm"));
    EXPECT_THAT(
        error_of([&] { GradientAccumulation(trained.model, {}); }),
        HasSubstr("there is no optimizer to step"));

    Trained<> other(FrontEnd::Ddp);
    EXPECT_THAT(
        error_of(
            [&] { GradientAccumulation(other.model, {*other.optimizer}); }),
        HasSubstr("Pass the DistributedDataParallel"));
    ZeroRedundancyOptimizer overlapping(
        parameters(other.model),
        optimizer_class<optim::AdamW>(1e-3),
        ZeroOptions().overlap_with_ddp(true));
    EXPECT_THAT(
        error_of([&] { GradientAccumulation(*other.ddp, {overlapping}); }),
        HasSubstr("made with overlap_with_ddp"));
  });
}

TEST(AccumulationErrorsTest, RejectsNumbersOfSamplesOnEveryRank) {
  on_ranks(2, [](const Group& world) {
    for (const FrontEnd kind : {FrontEnd::Flat, FrontEnd::Ddp}) {
      Trained<> trained(kind);
      const auto accumulation =
          trained.accumulate(GradientAccumulationOptions().steps(2));
      const auto loss = [&](int micro) {
        return loss_of(trained.model, batch_of(2, world.rank(), 0, micro));
      };
      const auto before = trained.snapshot();
      accumulation->backward(loss(0), world.rank() == 1 ? -1 : 2);
      EXPECT_THAT(
          error_of([&] { accumulation->backward(loss(1), 2); }),
          HasSubstr("negative number of samples"));
      accumulation->backward(loss(0), 0);
      EXPECT_THAT(
          error_of([&] { accumulation->backward(loss(1), 0); }),
          HasSubstr("no rank had a sample"));
      accumulation->backward(loss(0), 2);
      EXPECT_THAT(
          error_of([&] { accumulation->backward(loss(1)); }),
          HasSubstr("with and without a number of samples"));
      EXPECT_EQ(accumulation->num_pending(), 0);
      EXPECT_TRUE(all_equal(trained.snapshot(), before));
    }
    // Without numbers, nobody knows how to weight what the ranks have.
    Trained<> trained(FrontEnd::Ddp);
    const auto accumulation =
        trained.accumulate(GradientAccumulationOptions().steps(kMicro));
    for (int micro = 0; micro <= world.rank(); ++micro) {
      accumulation->backward(
          loss_of(trained.model, batch_of(2, world.rank(), 0, micro)));
    }
    EXPECT_THAT(
        error_of([&] { accumulation->flush(); }),
        AllOf(HasSubstr("1 micro-batches"), HasSubstr("2 micro-batches")));
  });
}

} // namespace
} // namespace tessera
