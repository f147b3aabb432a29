// Whole plans, without running anything.
#include "plan/plan.h"

#include "plan/checked.h"
#include "plan/fit.h"
#include "support/errors.h"

namespace tessera::plan {
namespace {

using format::DType;
using tessera::testing::error_of;
using ::testing::HasSubstr;

constexpr GptShape kSmall{
    .layers = 6,
    .width = 128,
    .heads = 2,
    .vocabulary = 500,
    .length = 32,
    .is_tied = false};

GptSubject small(int64_t batch = 2) {
  return {kSmall, {.batch = batch}};
}

TEST(PlanTest, ATrillionParametersOnManyRanksHaveSaneNumbers) {
  const GptSubject subject{
      {.layers = 128, .width = 25600, .heads = 200, .length = 4096},
      {.batch = 1, .recomputes = true}};
  const TrainingSetup setup{
      .shards = 16384, .param_dtype = DType::BFloat16, .device = Device::Cuda};
  const Plan plan = make_plan(subject, setup);
  EXPECT_NEAR(static_cast<double>(plan.numel), 1.0e12, 0.02e12);
  // Each rank has a 16384th, in float32, and twice that for AdamW.
  const double share = 4.0 * static_cast<double>(plan.numel) / 16384;
  EXPECT_NEAR(plan.at_rest.of(Kind::Shards), share, 0.01 * share);
  EXPECT_NEAR(plan.at_rest.of(Kind::Optimizer), 2 * share, 0.02 * share);
  // The root, and two blocks in bfloat16.
  const double block = 2.0 * 12 * 25600.0 * 25600.0;
  const double root = 2.0 * (50257 + 4096) * 25600;
  EXPECT_NEAR(
      plan.device.highest.of(Kind::Full), root + 2 * block, 0.01 * block);
  EXPECT_EQ(plan.wire.of(Operation::GatherForward).collectives, 129);
  EXPECT_EQ(plan.wire.of(Operation::GatherBackward).collectives, 128);
  EXPECT_EQ(plan.wire.of(Operation::ReduceScatter).collectives, 129);
  ASSERT_EQ(plan.units.size(), 2);
  EXPECT_EQ(plan.units[0].count, 128);
  EXPECT_EQ(plan.units[0].last, "blocks.127");
  EXPECT_GE(plan.device.at_peak.total(), plan.at_rest.total());
}

TEST(PlanTest, SavedActivationsFollowTheFormula) {
  const int64_t n = 2 * kSmall.length;
  const int64_t w = kSmall.width;
  const int64_t block =
      (16 * n * w + n * kSmall.heads + 4 * n) * 4; // see gpt.h
  const int64_t rest = (n * w + 2 * n) * 4 // norm: its input is the last output
      + n * w * 4 + n * kSmall.vocabulary * 4 // log-softmax
      + 2 * n * 8 + kSmall.length * 8; // ids
  TrainingSetup setup{.device = Device::Cpu};
  EXPECT_EQ(
      make_plan(small(), setup).after_forward.of(Kind::Activations),
      kSmall.layers * block + rest);
  GptSubject again = small();
  again.run.recomputes = true;
  EXPECT_EQ(
      make_plan(again, setup).after_forward.of(Kind::Activations),
      kSmall.layers * (n * w * 4 + 5056) + rest); // state of random numbers
  GptSubject in_chunks = small();
  in_chunks.run.chunks_loss = true; // the head's gradient, not the log-softmax
  EXPECT_EQ(
      make_plan(in_chunks, setup).after_forward.of(Kind::Activations),
      kSmall.layers * block + rest + (w - n) * kSmall.vocabulary * 4);
}

TEST(PlanTest, NothingIsLeftBehindByAStep) {
  for (const Engine engine : {Engine::Sharded, Engine::Ddp, Engine::Zero}) {
    for (const Device device : {Device::Cpu, Device::Cuda}) {
      const TrainingSetup setup{
          .engine = engine, .copies = 2, .accumulate = 3, .device = device};
      for (const bool chunks_loss : {false, true}) {
        GptSubject subject = small();
        subject.run.chunks_loss = chunks_loss;
        const Plan plan = make_plan(subject, setup);
        EXPECT_EQ(plan.at_rest.of(Kind::Activations), 0);
        EXPECT_EQ(plan.at_rest.of(Kind::Gradients), 0);
        EXPECT_EQ(plan.at_rest.of(Kind::Full), 0);
      }
    }
  }
}

TEST(PlanTest, BackwardsThatAccumulateGatherEachAndReduceAsTold) {
  const TrainingSetup one{.shards = 4};
  TrainingSetup many = one;
  many.accumulate = 10;
  TrainingSetup unsynced = many;
  unsynced.syncs_always = false;
  const auto traffic = [](const TrainingSetup& setup, Operation operation) {
    return make_plan(small(), setup).wire.of(operation).sent_bytes;
  };
  for (const auto gather :
       {Operation::GatherForward, Operation::GatherBackward}) {
    EXPECT_EQ(traffic(many, gather), 10 * traffic(one, gather));
  }
  // The root stays gathered where gradients are not reduced.
  EXPECT_LT(
      traffic(unsynced, Operation::GatherForward),
      10 * traffic(one, Operation::GatherForward));
  EXPECT_EQ(
      traffic(unsynced, Operation::GatherBackward),
      10 * traffic(one, Operation::GatherBackward));
  constexpr auto kReduce = Operation::ReduceScatter;
  EXPECT_EQ(traffic(many, kReduce), 10 * traffic(one, kReduce));
  EXPECT_EQ(traffic(unsynced, kReduce), traffic(one, kReduce));
  // Full gradients wait for the last one.
  EXPECT_GT(
      make_plan(small(), unsynced).device.highest.of(Kind::Gradients),
      4 * make_plan(small(), one).numel);
}

TEST(PlanTest, OffloadMovesShardsGradientsAndStateToTheHost) {
  const TrainingSetup setup{
      .shards = 2, .offload = true, .device = Device::Cuda};
  const Plan plan = make_plan(small(), setup);
  EXPECT_EQ(plan.device.highest.of(Kind::Shards), 0);
  EXPECT_EQ(plan.device.highest.of(Kind::Optimizer), 0);
  EXPECT_GT(plan.device.highest.of(Kind::Full), 0);
  const int64_t shards = plan.host.highest.of(Kind::Shards);
  EXPECT_NEAR(shards, 2 * plan.numel, 0.01 * shards);
  EXPECT_EQ(plan.host.highest.of(Kind::Gradients), shards);
}

TEST(PlanTest, HybridShardingReducesShardsOverTheCopies) {
  const TrainingSetup setup{.copies = 8, .shards = 4};
  const Plan plan = make_plan(small(), setup);
  EXPECT_EQ(
      plan.wire.of(Operation::AllReduce).tensor_bytes,
      plan.at_rest.of(Kind::Shards));
  EXPECT_EQ(
      plan.wire.of(Operation::ReduceScatter).tensor_bytes,
      4 * plan.at_rest.of(Kind::Shards));
}

TEST(PlanTest, ActivationsOfAnyModelAreWhatTheUserSays) {
  ModelSubject subject{.model = model_of(kSmall)};
  const TrainingSetup setup{.shards = 2};
  const Plan unknown = make_plan(subject, setup);
  EXPECT_FALSE(unknown.knows_activations);
  EXPECT_EQ(unknown.device.highest.of(Kind::Activations), 0);
  subject.activation_bytes = 1000003;
  const Plan known = make_plan(subject, setup);
  EXPECT_EQ(known.device.highest.of(Kind::Activations), 1000003);
  EXPECT_EQ(known.at_rest.of(Kind::Activations), 0);
}

TEST(PlanTest, OptimizersKeepTheirStates) {
  const auto state = [](Optimizer optimizer) {
    const TrainingSetup setup{.optimizer = optimizer};
    return make_plan(small(), setup).at_rest.of(Kind::Optimizer);
  };
  const int64_t params = 4 * model_of(kSmall).numel();
  const int64_t steps = 4 * model_of(kSmall).num_params();
  EXPECT_EQ(state(Optimizer::AdamW), 2 * params + steps);
  EXPECT_EQ(state(Optimizer::Adagrad), params + steps);
  EXPECT_EQ(state(Optimizer::RmsProp), params + steps);
  EXPECT_EQ(state(Optimizer::SgdMomentum), params);
  EXPECT_EQ(state(Optimizer::Sgd), 0);
  EXPECT_EQ(state(Optimizer::None), 0);
}

TEST(PlanTest, RejectsAbsurdInput) {
  const auto error = [](const GptSubject& subject, const TrainingSetup& setup) {
    return error_of([&] { make_plan(subject, setup); });
  };
  const auto shaped = [](auto change) {
    GptSubject subject = small();
    change(subject);
    return subject;
  };
  EXPECT_THAT(
      error(shaped([](auto& s) { s.shape.heads = 3; }), {}),
      HasSubstr("width 128 is not a multiple of 3 heads"));
  EXPECT_THAT(
      error(shaped([](auto& s) { s.shape.layers = 0; }), {}),
      HasSubstr("layers is 0: expected 1 to 10000"));
  EXPECT_THAT(
      error(shaped([](auto& s) { s.run.batch = -5; }), {}),
      HasSubstr("batch is -5"));
  EXPECT_THAT(
      error(
          shaped([](auto& s) {
            s.run.batch = int64_t{1} << 40;
            s.shape.length = int64_t{1} << 30;
          }),
          {}),
      HasSubstr("do not fit 64-bit numbers"));
  EXPECT_THAT(
      error(shaped([](auto& s) { s.shape.width = int64_t{1} << 33; }), {}),
      HasSubstr("do not fit 64-bit numbers"));
  EXPECT_THAT(
      error(small(), {.copies = 1 << 20, .shards = 1 << 20}),
      HasSubstr("ranks: expected 1 to 16777216"));
  EXPECT_THAT(error(small(), {.shards = 0}), HasSubstr("expected 1 to"));
  EXPECT_THAT(
      error(small(), {.accumulate = 0}), HasSubstr("0 backwards per step"));
  EXPECT_THAT(
      error(small(), {.dtype = DType::Int64}),
      HasSubstr("int64 has no gradients"));
  EXPECT_THAT(
      error(small(), {.engine = Engine::Ddp, .param_dtype = DType::BFloat16}),
      HasSubstr("belongs to sharding"));
}

TEST(FitTest, OneMoreWouldNotFit) {
  const TrainingSetup setup{.shards = 4};
  const Limit limit{20'000'000};
  const auto batch = largest_batch(small(), setup, limit);
  ASSERT_TRUE(batch);
  EXPECT_TRUE(fits(small(*batch), setup, limit));
  EXPECT_FALSE(fits(small(*batch + 1), setup, limit));

  const auto deep = largest_gpt(small(), setup, limit, Grows::Layers);
  ASSERT_TRUE(deep);
  GptSubject deeper{*deep, {.batch = 2}};
  EXPECT_TRUE(fits(deeper, setup, limit));
  ++deeper.shape.layers;
  EXPECT_FALSE(fits(deeper, setup, limit));

  const auto wide = largest_gpt(small(), setup, limit, Grows::Width);
  ASSERT_TRUE(wide);
  EXPECT_EQ(wide->width % 64, 0);
  GptSubject wider{*wide, {.batch = 2}};
  EXPECT_TRUE(fits(wider, setup, limit));
  wider.shape.width += 64;
  ++wider.shape.heads;
  EXPECT_FALSE(fits(wider, setup, limit));
}

TEST(FitTest, OneRankLessWouldNotFit) {
  const Plan whole = make_plan(small(), TrainingSetup{.shards = 11});
  const Limit limit{whole.device.at_peak.total()};
  TrainingSetup setup{.copies = 2, .shards = 1000};
  const auto world = smallest_world(small(), setup, limit);
  ASSERT_TRUE(world);
  EXPECT_EQ(*world % 2, 0); // two copies
  setup.shards = *world / 2;
  EXPECT_TRUE(fits(small(), setup, limit));
  --setup.shards;
  EXPECT_FALSE(fits(small(), setup, limit));
}

TEST(FitTest, NothingFitsWhereOneSequenceOrOneUnitIsTooMuch) {
  const Limit limit{1000};
  EXPECT_EQ(largest_batch(small(), {}, limit), std::nullopt);
  EXPECT_EQ(smallest_world(small(), {}, limit), std::nullopt);
  EXPECT_EQ(largest_gpt(small(), {}, limit, Grows::Layers), std::nullopt);
}

TEST(FitTest, CopiesDoNotHelpWhereNothingIsSharded) {
  const TrainingSetup setup{.engine = Engine::Ddp, .copies = 8};
  const Plan plan = make_plan(small(), setup);
  const Limit enough{plan.device.at_peak.total()};
  EXPECT_EQ(smallest_world(small(), setup, enough), 1);
  const Limit little{plan.at_rest.of(Kind::Shards)};
  EXPECT_EQ(smallest_world(small(), setup, little), std::nullopt);
}

} // namespace
} // namespace tessera::plan
