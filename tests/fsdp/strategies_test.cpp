// Sharding strategies: each trains as one process does, with its own
// collectives.
#include <tessera/fsdp/fsdp.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/schedule.h"
#include "engine/unit.h"
#include "fsdp/fsdp_unit.h"
#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests

struct StrategyCase {
  ShardingStrategy strategy;
  const char* name;
  bool orig;
  int size;
};

class FsdpStrategyTest : public ::testing::TestWithParam<StrategyCase> {
 protected:
  FSDPOptions options() const {
    auto result = by_block()
                      .sharding_strategy(GetParam().strategy)
                      .use_orig_params(GetParam().orig);
    if (GetParam().strategy == ShardingStrategy::HybridShard ||
        GetParam().strategy == ShardingStrategy::HybridShardZero2) {
      result.device_mesh(make_mesh({2, GetParam().size / 2}));
    }
    return result;
  }
};

TEST_P(FsdpStrategyTest, TrainingMatchesSingleProcess) {
  on_ranks(GetParam().size, [&](const Group& world) {
    auto reference = train_plain(world.size());
    auto module = make_stack();
    const FSDP model(module, options());
    auto losses =
        torch::tensor(train_sharded(module, world.rank()), at::kDouble);
    world.all_reduce(losses, ReduceOp::Avg);
    EXPECT_TRUE(torch::allclose(
        losses, torch::tensor(reference.losses, at::kDouble), 1e-9, 1e-9));
    expect_same_parameters(
        module, reference.model, world.size() == 1 ? 0 : 1e-9);
  });
}

TEST_P(FsdpStrategyTest, AccumulationWithoutSyncMatchesOneLargeBatch) {
  on_ranks(GetParam().size, [&](const Group& world) {
    auto plain = make_stack();
    auto optimizer = make_adamw(plain->parameters());
    for (int step = 0; step < 3; ++step) {
      (loss_of(plain, all_tokens(world.size(), step)) / 3).backward();
    }
    optimizer.step();
    for (const bool skip_all_reduce_only : {false, true}) {
      auto module = make_stack();
      const FSDP model(module, options());
      auto ours = make_adamw(parameters(*model));
      for (int step = 0; step < 2; ++step) {
        if (skip_all_reduce_only) {
          set_requires_all_reduce(*model, false);
          (loss_of(module, tokens(world.rank(), step)) / 3).backward();
          set_requires_all_reduce(*model, true);
        } else {
          const NoSync no_sync(*model);
          (loss_of(module, tokens(world.rank(), step)) / 3).backward();
        }
      }
      (loss_of(module, tokens(world.rank(), 2)) / 3).backward();
      ours.step();
      expect_same_parameters(module, plain, 1e-9);
    }
  });
}

TEST_P(FsdpStrategyTest, ClipGivesTheNormOfTheUnshardedGradients) {
  on_ranks(GetParam().size, [&](const Group& world) {
    auto plain = make_stack();
    loss_of(plain, all_tokens(world.size(), 0)).backward();
    auto module = make_stack();
    const FSDP model(module, options());
    loss_of(module, tokens(world.rank(), 0)).backward();
    const double expected =
        torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1, 2.0, true);
    EXPECT_NEAR(clip_grad_norm_(*model, 0.1).item<double>(), expected, 1e-9);
    EXPECT_NEAR(clip_grad_norm_(*model, 0.1).item<double>(), 0.1, 1e-5);
  });
}

TEST_P(FsdpStrategyTest, IssuesExactlyTheCollectivesOfTheStrategy) {
  on_ranks(GetParam().size, [&](const Group& world) {
    auto module = make_stack();
    const FSDP model(module, options());
    auto& schedule = fsdp_units(*model).at(0).inner()->unit->schedule();
    const int64_t units = 1 + kDepth;
    const bool shards = model.sharding_strategy() != ShardingStrategy::NoShard;
    const bool reshards =
        model.sharding_strategy() == ShardingStrategy::FullShard ||
        model.sharding_strategy() == ShardingStrategy::HybridShard;
    for (int step = 0; step < 3; ++step) {
      schedule.probe_for_tests().counts = {};
      loss_of(module, tokens(world.rank(), step)).backward();
      EXPECT_EQ(
          schedule.probe_for_tests().counts.gathers,
          !shards        ? 0
              : reshards ? units + kDepth // blocks again in backward
                         : units);
      EXPECT_EQ(
          schedule.probe_for_tests().counts.reductions,
          world.size() == 1 ? 0 : units);
    }
  });
}

std::vector<StrategyCase> strategy_cases() {
  std::vector<StrategyCase> cases;
  for (const bool orig : {false, true}) {
    for (const int size : {1, 2, 3, 4}) {
      cases.push_back({ShardingStrategy::FullShard, "FullShard", orig, size});
    }
    for (const int size : {2, 4}) {
      cases.push_back(
          {ShardingStrategy::ShardGradOp, "ShardGradOp", orig, size});
      cases.push_back({ShardingStrategy::NoShard, "NoShard", orig, size});
    }
    cases.push_back({ShardingStrategy::HybridShard, "Hybrid", orig, 4});
    cases.push_back(
        {ShardingStrategy::HybridShardZero2, "HybridZero2", orig, 4});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(
    Strategies,
    FsdpStrategyTest,
    ::testing::ValuesIn(strategy_cases()),
    [](const auto& test) {
      return std::string(test.param.name) + std::to_string(test.param.size) +
          (test.param.orig ? "Orig" : "Flat");
    });

} // namespace
} // namespace tessera
