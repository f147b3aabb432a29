// Gradients of sharded parameters: which exist, where they are reduced, and
// what a user may do with them.
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adamw.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/schedule.h"
#include "engine/unit.h"
#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

TEST(FsdpTest, FrozenParametersCanBeThawedAndBack) {
  on_ranks(2, [](const Group& world) {
    auto plain = make_stack();
    auto module = make_stack();
    shard_blocks(module);
    const auto leaf_of = [](const at::Tensor& face) {
      return engine::unit_of(face)->params().leaf_of(
          face.unsafeGetTensorImpl());
    };
    const at::Tensor weight = module->blocks[0]->as<Block>()->up->weight;
    const at::Tensor leaf = leaf_of(weight);
    loss_of(module, tokens(world.rank(), 0)).backward();
    EXPECT_TRUE(leaf.grad().defined()); // an empty one, if the leaf is
    set_requires_grad(weight, false);
    EXPECT_FALSE(weight.requires_grad());
    EXPECT_FALSE(leaf.grad().defined()); // stale
    loss_of(module, tokens(world.rank(), 0)).backward();
    EXPECT_FALSE(leaf.grad().defined());
    // Through the leaf that the user holds: seen at the next touch.
    at::Tensor(leaf).set_requires_grad(true);
    loss_of(module, tokens(world.rank(), 0)).backward();
    EXPECT_TRUE(leaf.grad().defined());
    loss_of(plain, all_tokens(world.size(), 0)).backward();
    auto guard = summon_full_params(*module, SummonOptions().with_grads(true));
    EXPECT_TRUE(torch::allclose(
        module->blocks[0]->as<Block>()->up->weight.grad(),
        plain->blocks[0]->as<Block>()->up->weight.grad(),
        1e-9,
        1e-9));
    guard.close();
  });
}

TEST(FsdpTest, FreezingThroughWhatTheUserHoldsIsFollowed) {
  on_ranks(2, [](const Group& world) {
    auto module = make_stack();
    shard_blocks(module);
    const auto gradient_of = [&](const at::Tensor& face) {
      const auto guard =
          summon_full_params(*module, SummonOptions().with_grads(true));
      return face.grad().defined() ? face.grad().clone() : at::Tensor();
    };
    const auto step = [&] {
      for (const auto& leaf : parameters(*module)) {
        leaf.mutable_grad().reset();
      }
      loss_of(module, tokens(world.rank(), 0)).backward();
    };
    at::Tensor weight = module->blocks[1]->as<Block>()->up->weight;
    weight.set_requires_grad(false); // a face: LibTorch says nothing
    step();
    EXPECT_FALSE(weight.requires_grad());
    EXPECT_FALSE(gradient_of(weight).defined());
    weight.set_requires_grad(true);
    step();
    EXPECT_TRUE(gradient_of(weight).defined());
    // All of them, and back: the node behind the faces goes and comes.
    for (auto& parameter : module->parameters()) {
      parameter.set_requires_grad(false);
    }
    { const auto guard = summon_full_params(*module); }
    EXPECT_FALSE(loss_of(module, tokens(world.rank(), 0)).requires_grad());
    for (auto& parameter : module->parameters()) {
      set_requires_grad(parameter, true);
    }
    step();
    EXPECT_TRUE(gradient_of(weight).defined());
  });
}

TEST(FsdpTest, HooksOnParametersRunAndKeepTheUnit) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Linear linear(torch::nn::LinearOptions(4, 4).bias(false));
    fully_shard(*linear);
    int calls = 0;
    linear->weight.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      return gradient * 2;
    });
    linear->forward(torch::ones({1, 4})).sum().backward();
    EXPECT_EQ(calls, 1);
    if (world.rank() == 0) { // has all 16 elements
      EXPECT_EQ(parameters(*linear).at(0).grad().max().item<double>(), 2);
    }
  });
}

/// Like experts of a mixture: which parameters of a unit a rank uses depends on
/// its data.
TEST(FsdpTest, AParameterUsedOnOneRankTrainsOnAll) {
  struct Experts : torch::nn::Module {
    at::Tensor a = register_parameter("a", torch::ones({6}, at::kDouble));
    at::Tensor b = register_parameter("b", torch::ones({6}, at::kDouble));
    at::Tensor unused = register_parameter("c", torch::ones({6}, at::kDouble));
  };
  on_ranks(2, [](const Group& world) {
    for (const auto strategy :
         {ShardingStrategy::FullShard, ShardingStrategy::NoShard}) {
      auto experts = std::make_shared<Experts>();
      const FSDP model(
          experts,
          FSDPOptions().sharding_strategy(strategy).use_orig_params(true));
      ((world.rank() == 0 ? experts->a : experts->b) * 3).sum().backward();
      const auto guard =
          summon_full_params(*model, SummonOptions().with_grads(true));
      for (const at::Tensor& used : {experts->a, experts->b}) {
        ASSERT_TRUE(used.grad().defined());
        EXPECT_TRUE(
            torch::allclose(used.grad(), torch::full({6}, 1.5, at::kDouble)));
      }
      EXPECT_FALSE(experts->unused.grad().defined()); // on no rank
    }
  });
}

TEST(FsdpTest, RanksTalkOfUseOnlyWhereOneIsInDoubt) {
  on_ranks(2, [](const Group& world) {
    const auto exchanges = [&](Stack& module) {
      auto& schedule = *engine::Schedule::of(world);
      schedule.probe_for_tests().counts = {};
      loss_of(module, tokens(world.rank(), 0)).backward();
      return schedule.probe_for_tests().counts.use_exchanges;
    };
    auto flat = make_stack();
    const FSDP handle(flat, by_block()); // one leaf for many parameters
    EXPECT_EQ(exchanges(flat), 0);
    auto frozen = make_stack();
    frozen->head.set_requires_grad(false);
    shard_blocks(frozen);
    EXPECT_EQ(exchanges(frozen), 0);
    auto unused = make_stack();
    unused->register_parameter("extra", torch::ones({3}, at::kDouble));
    shard_blocks(unused);
    EXPECT_EQ(exchanges(unused), 1);
  });
}

TEST(FsdpTest, AStepWhileUnitsAreFullIsSeenOnRanksWithNothingToWrite) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Linear linear(2, 3); // nine elements: none of them on rank 1
    fully_shard(*linear);
    ASSERT_EQ(world.rank() == 1, parameters(*linear)[0].numel() == 0);
    const auto x = torch::ones({1, 2});
    optim::AdamW optimizer(parameters(*linear), 0.5);
    linear->forward(x).sum().backward();
    torch::NoGradGuard no_grad;
    const double before = linear->forward(x).sum().item<double>(); // Full now
    optimizer.step();
    EXPECT_NE(linear->forward(x).sum().item<double>(), before);
  });
}

TEST(FsdpTest, WhatWaitsIsReducedAlsoWhereTheStepDoesNotUseIt) {
  on_ranks(4, [](const Group& world) {
    const auto mesh = make_mesh({2, 2});
    for (const bool skip_all_reduce_only : {false, true}) {
      auto module = make_stack();
      shard_blocks(module, FullyShardOptions().mesh(mesh));
      auto* block = module->blocks[2]->as<Block>();
      const auto x = torch::ones({1, kWidth}, at::kDouble) * (world.rank() + 1);
      if (skip_all_reduce_only) {
        set_requires_all_reduce(*module, false);
        block->forward(x).sum().backward();
        set_requires_all_reduce(*module, true);
      } else {
        const NoSync no_sync(*module);
        block->forward(x).sum().backward();
      }
      const auto has_gradient = [&] {
        const auto guard =
            summon_full_params(*module, SummonOptions().with_grads(true));
        return block->up->weight.grad().defined();
      };
      EXPECT_FALSE(has_gradient());
      module->blocks[0]->as<Block>()->forward(x).sum().backward();
      EXPECT_TRUE(has_gradient());
    }
  });
}

TEST(FsdpTest, ClipTakesComplexAndRefusesOddNorms) {
  on_ranks(2, [](const Group&) {
    torch::nn::Module module;
    auto weight = module.register_parameter(
        "weight", torch::ones({40}, at::kComplexDouble));
    fully_shard(
        module,
        FullyShardOptions().mp_policy(
            MixedPrecisionPolicy().param_dtype(at::kBFloat16)));
    at::real(weight * c10::complex<double>(3, 4)).sum().backward();
    EXPECT_NEAR(
        clip_grad_norm_(module, 1e9).item<double>(), 5 * std::sqrt(40), 1e-9);
    EXPECT_THAT(
        error_of([&] { clip_grad_norm_(module, 1.0, 0.0); }),
        HasSubstr("expected a positive number or infinity"));
    const double infinity = std::numeric_limits<double>::infinity();
    for (const auto& leaf : parameters(module)) {
      if (leaf.numel() > 0) {
        leaf.mutable_grad().mul_(std::nan(""));
      }
    }
    EXPECT_TRUE(
        std::isnan(clip_grad_norm_(module, 1.0, infinity).item<double>()));
  });
}

TEST(FsdpTest, GradOfShardsReturnsThemAndLeavesGradAlone) {
  on_ranks(2, [](const Group& world) {
    for (const auto layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
      auto expected_model = make_stack();
      shard_blocks(expected_model, FullyShardOptions().layout(layout));
      loss_of(expected_model, tokens(world.rank(), 0)).backward();
      auto module = make_stack();
      shard_blocks(module, FullyShardOptions().layout(layout));
      const auto leaves = parameters(*module);
      const auto gradients = torch::autograd::grad(
          {loss_of(module, tokens(world.rank(), 0))},
          leaves,
          {},
          std::nullopt,
          false,
          /*allow_unused=*/true);
      const auto expected = parameters(*expected_model);
      for (size_t i = 0; i < leaves.size(); ++i) {
        EXPECT_FALSE(leaves[i].grad().defined());
        ASSERT_EQ(gradients[i].defined(), expected[i].grad().defined());
        if (gradients[i].defined()) {
          EXPECT_TRUE(torch::equal(gradients[i], expected[i].grad()));
        }
      }
    }
  });
}

} // namespace
} // namespace tessera
