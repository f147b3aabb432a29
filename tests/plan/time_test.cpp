// The predicted time of a step.
#include <algorithm>

#include "engine/gather_order.h"
#include "plan/clock.h"
#include "plan/plan.h"

namespace tessera::plan {
namespace {

TEST(ClockTest, TheWireCarriesOneCollectiveAtATimeBesideComputing) {
  Clock clock(
      {.flops = 10, .wire = {.bytes_per_second = 4, .latency_seconds = 1}});
  const double first = clock.send(8);
  const double second = clock.send(4);
  EXPECT_DOUBLE_EQ(first, 1 + 2);
  EXPECT_DOUBLE_EQ(second, 3 + 1 + 1);
  clock.compute(20); // 2 s
  clock.wait_until(first);
  EXPECT_DOUBLE_EQ(clock.now(), 3);
  clock.compute(50);
  clock.wait_until(second); // has been there for long
  EXPECT_DOUBLE_EQ(clock.time().together(), 8);
  EXPECT_DOUBLE_EQ(clock.time().computing, 7);
  EXPECT_DOUBLE_EQ(clock.time().waiting, 1);
  EXPECT_DOUBLE_EQ(clock.time().sending, 5);
  EXPECT_DOUBLE_EQ(clock.send(4), 8 + 2); // the wire is idle
}

TEST(ClockTest, NothingTakesTimeWithoutSpeeds) {
  Clock clock;
  clock.compute(1e30);
  clock.wait_until(clock.send(INT64_MAX));
  EXPECT_EQ(clock.now(), 0);
  EXPECT_FALSE(Speeds().are_known());
}

TEST(ClockTest, RepeatsCountLikeTheFirst) {
  Clock clock({.flops = 10, .wire = {.bytes_per_second = 4}});
  const StepTime before = clock.time();
  clock.compute(10);
  clock.wait_until(clock.send(8));
  clock.repeat_since(before, 3);
  EXPECT_DOUBLE_EQ(clock.time().together(), 4 * 3);
  EXPECT_DOUBLE_EQ(clock.time().computing, 4);
  EXPECT_DOUBLE_EQ(clock.time().sending, 4 * 2);
}

constexpr GptShape kShape{
    .layers = 12,
    .width = 768,
    .heads = 12,
    .vocabulary = 50257,
    .length = 1024};

StepTime time_of(const TrainingSetup& setup) {
  return make_plan(GptSubject{kShape, {.batch = 4}}, setup).time;
}

Speeds speeds(double bandwidth) {
  return {.flops = 4e14, .wire = {.bytes_per_second = bandwidth}};
}

TEST(StepTimeTest, ComputesSixOperationsForEachParameterAndToken) {
  const double tokens = 4 * 1024;
  // All but the positions, and attention: the trainer counts alike for MFU.
  const double multiplied = 124.44e6 - 1024 * 768;
  const double flops = tokens * (6 * multiplied + 12.0 * 12 * 768 * 1024);
  const StepTime time = time_of({.speeds = speeds(50e9)});
  EXPECT_NEAR(time.computing, flops / 4e14, 0.001 * time.computing);
  EXPECT_EQ(time.sending, 0); // one rank
  EXPECT_NEAR(time.together(), time.computing, 1e-9);
}

/// Forward makes the gradients, too.
TEST(StepTimeTest, ALossInChunksComputesTheSame) {
  const TrainingSetup setup{.speeds = speeds(50e9)};
  const Plan whole = make_plan(GptSubject{kShape, {.batch = 4}}, setup);
  const Plan chunked =
      make_plan(GptSubject{kShape, {.batch = 4, .chunks_loss = true}}, setup);
  EXPECT_NEAR(
      chunked.time.computing,
      whole.time.computing,
      1e-9 * whole.time.computing);
  EXPECT_LT(
      chunked.device.at_peak.total(), 0.75 * whole.device.at_peak.total());
}

TEST(StepTimeTest, IsAtLeastEachLaneAndAtMostBoth) {
  for (const Engine engine : {Engine::Sharded, Engine::Ddp, Engine::Zero}) {
    for (const double bandwidth : {1e9, 20e9, 50e9, 400e9}) {
      TrainingSetup setup{.engine = engine, .speeds = speeds(bandwidth)};
      (engine == Engine::Sharded ? setup.shards : setup.copies) = 64;
      const StepTime time = time_of(setup);
      EXPECT_GE(time.together(), std::max(time.computing, time.sending) - 1e-9);
      EXPECT_LE(time.together(), time.computing + time.sending + 1e-9);
      EXPECT_GT(time.sending, 0);
    }
  }
}

/// The embedding is also the head: its gradient is complete last.
TEST(StepTimeTest, BucketsTravelWhileBackwardComputes) {
  for (const Engine engine : {Engine::Ddp, Engine::Zero}) {
    TrainingSetup setup{
        .engine = engine, .copies = 64, .speeds = speeds(400e9)};
    const StepTime time = time_of(setup);
    ASSERT_GT(time.computing, 1.2 * time.sending);
    EXPECT_GT(time.hidden(), 0.3 * time.sending);
    EXPECT_LT(time.waiting, 0.7 * time.sending);
  }
}

/// All but those of the root and of the first block, which are complete last: a
/// third of the model here.
TEST(StepTimeTest, HybridShardingAveragesOverTheCopiesBesideBackward) {
  TrainingSetup setup{.shards = 8, .speeds = speeds(400e9)};
  const StepTime alone = time_of(setup);
  setup.copies = 8;
  const StepTime hybrid = time_of(setup);
  const double more = hybrid.sending - alone.sending;
  ASSERT_GT(more, 0);
  ASSERT_GT(hybrid.computing, 1.2 * hybrid.sending);
  EXPECT_LE(hybrid.waiting - alone.waiting, 0.5 * more);
}

/// Only the first gather and the last reduction have nothing to hide behind.
TEST(StepTimeTest, WaitsForLittleWhereComputingTakesLonger) {
  TrainingSetup setup{
      .shards = 64,
      .param_dtype = format::DType::BFloat16,
      .speeds = speeds(200e9)};
  const StepTime time = time_of(setup);
  ASSERT_GT(time.computing, 1.2 * time.sending);
  const double root = 50257 * 768 + 1024 * 768 + 2 * 768;
  const double ends = (2 + 4) * root * 63 / 64 / 200e9;
  EXPECT_LE(time.together(), 1.05 * (time.computing + ends));
  setup.reshard_after_forward = false; // nothing is gathered in backward
  EXPECT_LT(time_of(setup).sending, time.sending);
}

/// The benchmark `overlap` of a GPT whose embedding and output layer are units
/// of their own, on a GPU, as 470 TFLOPS compute it.
struct OverlapTask {
  GptShape shape = {
      .layers = 12,
      .width = 768,
      .heads = 12,
      .vocabulary = 50304,
      .length = 1024,
      .is_tied = false,
      .splits_root = true};
  TrainingSetup setup = {
      .shards = 64,
      .param_dtype = format::DType::BFloat16,
      .device = Device::Cuda,
      .speeds = {
          .flops = 4.7e14,
          .wire = {.bytes_per_second = 50e9, .latency_seconds = 20e-6}}};

  Plan plan() const {
    return make_plan(GptSubject{shape, {.batch = 8}}, setup);
  }
  /// Of a step: the wire, or computing with the first gather and the last
  /// reduction.
  double limit() const {
    const StepTime time = plan().time;
    const double embedding =
        static_cast<double>(shape.vocabulary * shape.width);
    const double ends = (2 + 4) * embedding *
            static_cast<double>(setup.shards - 1) /
            static_cast<double>(setup.shards) /
            setup.speeds.wire.bytes_per_second +
        2 * setup.speeds.wire.latency_seconds;
    return std::max(time.sending, time.computing + ends);
  }
};

TEST(StepTimeTest, OverlapIsWithinFivePercentOfItsLimit) {
  for (const int64_t ranks : {8, 64, 1024}) {
    for (const double bandwidth : {50e9, 400e9}) {
      for (const bool is_large : {false, true}) {
        OverlapTask task;
        task.setup.shards = ranks;
        task.setup.speeds.wire.bytes_per_second = bandwidth;
        if (is_large) {
          task.shape.layers = 36;
          task.shape.width = 1280;
          task.shape.heads = 20;
        }
        EXPECT_LE(task.plan().time.together(), 1.05 * task.limit())
            << ranks << " ranks at " << bandwidth << ", width "
            << task.shape.width;
      }
    }
  }
}

TEST(StepTimeTest, MemoryForOverlapShortensAStepThatWaitsForTheWire) {
  OverlapTask task;
  const Plan with_memory = task.plan();
  task.setup.overlap_bytes = 0;
  const Plan without = task.plan();
  EXPECT_LT(with_memory.time.together(), 0.9 * without.time.together());
  EXPECT_EQ(
      with_memory.wire.total().sent_bytes, without.wire.total().sent_bytes);
  // As much for gathers and for reductions, at most.
  const int64_t more = 2 * engine::default_overlap_bytes(/*on_cpu=*/false);
  EXPECT_LE(
      with_memory.device.at_peak.total(),
      without.device.at_peak.total() + more);
}

TEST(StepTimeTest, AnAccumulationForeseesItsNextForward) {
  OverlapTask task;
  task.setup.accumulate = 4;
  task.setup.syncs_always = false;
  task.setup.speeds.wire.bytes_per_second = 94.9e9;
  EXPECT_LE(task.plan().time.together(), 1.05 * task.limit());
  // Blocks that stay are not gathered again.
  TrainingSetup always = task.setup;
  always.syncs_always = true;
  const GptSubject subject{task.shape, {.batch = 8}};
  EXPECT_LT(
      task.plan().wire.of(Operation::GatherForward).sent_bytes,
      make_plan(subject, always).wire.of(Operation::GatherForward).sent_bytes);
}

TEST(StepTimeTest, AccumulationMultipliesWhatItRepeats) {
  TrainingSetup setup{.shards = 8, .speeds = speeds(50e9)};
  const StepTime one = time_of(setup);
  setup.accumulate = 10;
  const StepTime ten = time_of(setup);
  EXPECT_NEAR(ten.together(), 10 * one.together(), 1e-6 * ten.together());
  EXPECT_NEAR(ten.sending, 10 * one.sending, 1e-6 * ten.sending);
  setup.syncs_always = false;
  EXPECT_LT(time_of(setup).sending, ten.sending);
}

} // namespace
} // namespace tessera::plan
