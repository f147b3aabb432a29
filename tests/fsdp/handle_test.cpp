// The FSDP handle: strategies, options and what users do with a model.
#include <tessera/error.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adamw.h>

#include <ATen/autocast_mode.h>

#include <cmath>
#include <limits>
#include <map>

#include "engine/schedule.h"
#include "engine/unit.h"
#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::ElementsAre;
using ::testing::HasSubstr;

FSDPOptions by_block() {
  return FSDPOptions().auto_wrap_policy(module_wrap_policy<Block>());
}

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
    if (GetParam().strategy == ShardingStrategy::HYBRID_SHARD ||
        GetParam().strategy == ShardingStrategy::HYBRID_SHARD_ZERO2) {
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
    EXPECT_NEAR(clip_grad_norm_(*model, 0.1), expected, 1e-9);
    EXPECT_NEAR(clip_grad_norm_(*model, 0.1), 0.1, 1e-5);
  });
}

TEST_P(FsdpStrategyTest, IssuesExactlyTheCollectivesOfTheStrategy) {
  on_ranks(GetParam().size, [&](const Group& world) {
    auto module = make_stack();
    const FSDP model(module, options());
    auto& schedule = fsdp_modules(*model).at(0).unit()->schedule();
    const int64_t units = 1 + kDepth;
    const bool shards = model.sharding_strategy() != ShardingStrategy::NO_SHARD;
    const bool reshards =
        model.sharding_strategy() == ShardingStrategy::FULL_SHARD ||
        model.sharding_strategy() == ShardingStrategy::HYBRID_SHARD;
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
      cases.push_back({ShardingStrategy::FULL_SHARD, "FullShard", orig, size});
    }
    for (const int size : {2, 4}) {
      cases.push_back(
          {ShardingStrategy::SHARD_GRAD_OP, "ShardGradOp", orig, size});
      cases.push_back({ShardingStrategy::NO_SHARD, "NoShard", orig, size});
    }
    cases.push_back({ShardingStrategy::HYBRID_SHARD, "Hybrid", orig, 4});
    cases.push_back(
        {ShardingStrategy::HYBRID_SHARD_ZERO2, "HybridZero2", orig, 4});
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

TEST(FsdpTest, OffloadedShardsTrainAsOthers) {
  on_ranks(2, [](const Group& world) {
    auto reference = train_plain(world.size());
    for (const bool orig : {false, true}) {
      auto module = make_stack();
      const FSDP model(
          module,
          by_block().use_orig_params(orig).cpu_offload(
              CPUOffload().offload_params(true)));
      train_sharded(module, world.rank());
      for (const auto& leaf : parameters(*model)) {
        EXPECT_TRUE(leaf.is_cpu());
      }
      expect_same_parameters(module, reference.model, 1e-9);
    }
    auto module = make_stack();
    shard_blocks(
        module, FullyShardOptions().offload_policy(CPUOffloadPolicy()));
    train_sharded(module, world.rank());
    expect_same_parameters(module, reference.model, 1e-9);
  });
}

TEST(FsdpTest, TheFlatParameterStandsAtTheUnitsPlace) {
  on_ranks(2, [](const Group&) {
    auto module = make_stack();
    const FSDP model(module, by_block());
    std::vector<std::string> names;
    for (const auto& [name, tensor] : named_parameters(*model)) {
      names.push_back(name);
      EXPECT_EQ(tensor.dim(), 1);
      EXPECT_TRUE(tensor.is_leaf());
    }
    EXPECT_THAT(
        names,
        ElementsAre(
            "_flat_param",
            "blocks.0._flat_param",
            "blocks.1._flat_param",
            "blocks.2._flat_param"));
    EXPECT_TRUE(parameters(*model)[1].is_same(parameters(*model)[1]));
  });
}

TEST(FsdpTest, PoliciesChooseUnits) {
  on_ranks(2, [](const Group&) {
    const auto names_of = [](const WrapPolicy& policy) {
      auto module = make_stack();
      const FSDP model(module, FSDPOptions().auto_wrap_policy(policy));
      std::vector<std::string> names;
      for (const FsdpUnit& unit : fsdp_modules(*model)) {
        names.push_back(unit.is_root() ? "root" : unit.name());
      }
      return names;
    };
    EXPECT_THAT(
        names_of(module_wrap_policy<torch::nn::LayerNorm>()),
        ElementsAre("root", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm"));
    EXPECT_THAT(
        names_of(lambda_auto_wrap_policy([](const torch::nn::Module& module) {
          return module.as<torch::nn::EmbeddingImpl>() != nullptr;
        })),
        ElementsAre("root", "embed"));
    // A block has 6 * 18 * 2 + 18 + 6 + 12 parameters, a linear 126 or 114.
    EXPECT_THAT(
        names_of(size_based_auto_wrap_policy(200)),
        ElementsAre("root", "blocks.0", "blocks.1", "blocks.2"));
    EXPECT_EQ(names_of(size_based_auto_wrap_policy(110)).size(), 7u);
    // Every module; the list of blocks has no parameters of its own.
    EXPECT_EQ(names_of(always_wrap_policy()).size(), 1u + 1 + 1 + 3 * 4);
  });
}

TEST(FsdpTest, AUnitWithoutParametersMakesTheOnesBelowReshard) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Sequential model(
        torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    for (const auto& child : model->children()) {
      fully_shard(*child);
    }
    fully_shard(*model); // nothing is left for it
    const auto units = fsdp_modules(*model);
    ASSERT_EQ(units.size(), 3u);
    EXPECT_TRUE(units[0].is_root());
    EXPECT_FALSE(units[1].is_root());
    auto loss = model->forward(torch::ones({1, 4})).sum();
    EXPECT_EQ(units[1].allocated_numel(), 0); // freed for the next one
    loss.backward();
    EXPECT_EQ(units[2].allocated_numel(), 0);
    EXPECT_EQ(world.size(), 2);
  });
}

TEST(FsdpTest, AUnitOutlivesTheModuleThatNamedIt) {
  on_ranks(2, [](const Group& world) {
    auto reference = train_plain(world.size());
    auto model = make_stack();
    for (int64_t i = 0; i < kDepth; ++i) {
      // Containers that go at once: their addresses are taken by the next.
      torch::nn::Sequential container(
          Block(std::dynamic_pointer_cast<BlockImpl>(
              model->blocks->ptr(static_cast<size_t>(i)))));
      fully_shard(*container);
    }
    fully_shard(*model);
    auto& schedule = *engine::Schedule::of(world);
    schedule.probe_for_tests().counts = {};
    loss_of(model, tokens(world.rank(), 0)).backward();
    EXPECT_EQ(schedule.probe_for_tests().counts.gathers, 1 + 2 * kDepth);
    for (auto& leaf : parameters(*model)) {
      leaf.mutable_grad().reset();
    }
    train_sharded(model, world.rank());
    expect_same_parameters(model, reference.model, 1e-9);
  });
}

TEST(FsdpTest, TiedParametersGoToTheLowestUnitThatContainsThem) {
  on_ranks(2, [](const Group& world) {
    auto reference = train_plain(world.size(), /*tied=*/true);
    auto module = make_stack(/*tied=*/true);
    const FSDP model(
        module,
        FSDPOptions()
            .auto_wrap_policy(module_wrap_policy<torch::nn::Embedding, Block>())
            .use_orig_params(true));
    // The embedding's weight is the head of the whole too.
    EXPECT_TRUE(engine::unit_of(module->embed->weight)->is_root());
    train_sharded(module, world.rank());
    expect_same_parameters(module, reference.model, 1e-9);
  });
}

TEST(FsdpTest, IgnoredModulesKeepTheirParameters) {
  on_ranks(2, [](const Group& world) {
    auto module = make_stack();
    const at::Tensor before = module->embed->weight.detach().clone();
    const FSDP model(
        module,
        by_block().use_orig_params(true).ignored_modules(
            {module->embed.ptr(), module->blocks->ptr(0)}));
    EXPECT_EQ(engine::unit_of(module->embed->weight), nullptr);
    EXPECT_TRUE(torch::equal(module->embed->weight, before));
    EXPECT_EQ(fsdp_modules(*model).size(), 3u);
    EXPECT_TRUE(parameters(*model).at(1).is_same(module->embed->weight));
    loss_of(module, tokens(world.rank(), 0)).backward();
    EXPECT_TRUE(module->embed->weight.grad().defined());
  });
}

TEST(FsdpTest, SyncModuleStatesTakesRankZerosValues) {
  on_ranks(3, [](const Group& world) {
    torch::manual_seed(100 + static_cast<uint64_t>(world.rank()));
    torch::nn::BatchNorm1d norm(4);
    torch::nn::Linear linear(3, 4);
    norm->running_mean.fill_(world.rank() + 7);
    torch::nn::Sequential module(linear, norm);
    at::Tensor expected = linear->weight.detach().clone();
    world.broadcast(expected, 0);
    const FSDP model(module, FSDPOptions().sync_module_states(true));
    EXPECT_EQ(norm->running_mean[0].item<double>(), 7);
    auto guard = summon_full_params(*model);
    EXPECT_TRUE(torch::equal(linear->weight, expected));
    guard.close();
  });
}

TEST(FsdpTest, ParamInitFnFillsWhatIsOnTheMetaDevice) {
  on_ranks(2, [](const Group&) {
    struct OnMeta : torch::nn::Module {
      at::Tensor weight =
          register_parameter("weight", torch::empty({4, 3}, at::kMeta));
    };
    auto inner = std::make_shared<OnMeta>();
    auto module = std::make_shared<torch::nn::Module>();
    module->register_module("inner", inner);
    int calls = 0;
    const FSDP model(
        module, FSDPOptions().param_init_fn([&](torch::nn::Module& one) {
          ++calls;
          for (auto& parameter : one.parameters(/*recurse=*/false)) {
            parameter.fill_(3);
          }
        }));
    EXPECT_EQ(calls, 1);
    auto guard = summon_full_params(*model);
    EXPECT_EQ(inner->weight.sum().item<double>(), 36);
    guard.close();
  });
}

TEST(FsdpTest, MixedPrecisionComputesLowAndKeepsHigh) {
  on_ranks(2, [](const Group& world) {
    torch::manual_seed(1);
    torch::nn::Linear linear(8, 8);
    torch::nn::Sequential module(
        linear,
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
        torch::nn::Linear(8, 2));
    module->register_buffer("scale", torch::ones({2}));
    const FSDP model(
        module,
        FSDPOptions().use_orig_params(true).mixed_precision(
            MixedPrecision()
                .param_dtype(at::kBFloat16)
                .reduce_dtype(at::kFloat)
                .buffer_dtype(at::kBFloat16)));
    auto x = torch::ones({3, 8}, at::requires_grad());
    // The handle casts its input, the plain forward each operand that clashes.
    EXPECT_EQ(model(x).scalar_type(), at::kBFloat16);
    const auto output = module->forward(x);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    EXPECT_EQ(linear->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(model->named_buffers()["scale"].scalar_type(), at::kBFloat16);
    output.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
    for (const auto& leaf : parameters(*model)) {
      EXPECT_EQ(leaf.scalar_type(), at::kFloat);
      if (leaf.grad().defined()) {
        EXPECT_EQ(leaf.grad().scalar_type(), at::kFloat);
      }
    }
    EXPECT_EQ(world.size(), 2);
  });
}

TEST(FsdpTest, MixedPrecisionTakesRecurrentAndConvolutionalInputs) {
  on_ranks(2, [](const Group&) {
    struct Net : torch::nn::Module {
      torch::nn::Conv1d conv =
          register_module("conv", torch::nn::Conv1d(3, 4, 1));
      torch::nn::BatchNorm1d norm =
          register_module("norm", torch::nn::BatchNorm1d(4));
      torch::nn::LSTM lstm = register_module("lstm", torch::nn::LSTM(4, 5));
      at::Tensor forward(const at::Tensor& x) {
        const auto y = norm(conv(x)).permute({2, 0, 1});
        return std::get<0>(lstm(y));
      }
    };
    auto net = std::make_shared<Net>();
    fully_shard(
        *net,
        FullyShardOptions().mp_policy(
            MixedPrecisionPolicy().param_dtype(at::kBFloat16)));
    const auto output = net->forward(torch::ones({2, 3, 6}));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    // Statistics are buffers and keep their precision.
    EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_NE(net->norm->running_var.sum().item<double>(), 4);
  });
}

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
         {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD}) {
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

TEST(FsdpTest, MixedPrecisionHasTheGradientsOfTheLowDtype) {
  on_ranks(2, [](const Group& world) {
    torch::manual_seed(1);
    torch::nn::Linear plain(8, 8);
    torch::manual_seed(1);
    torch::nn::Linear linear(8, 8);
    fully_shard(
        *linear,
        FullyShardOptions().mp_policy(MixedPrecisionPolicy()
                                          .param_dtype(at::kBFloat16)
                                          .reduce_dtype(at::kFloat)));
    plain->to(at::kBFloat16);
    torch::manual_seed(2);
    const auto x = torch::randn({4, 8}, at::kBFloat16);
    plain->forward(x).square().sum().backward();
    linear->forward(x).square().sum().backward();
    const auto guard =
        summon_full_params(*linear, SummonOptions().with_grads(true));
    // Equal data: the average of equal bfloat16 values, in float.
    EXPECT_TRUE(torch::equal(
        linear->weight.grad(), plain->weight.grad().to(at::kFloat)));
    EXPECT_EQ(world.size(), 2);
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
    EXPECT_NEAR(clip_grad_norm_(module, 1e9), 5 * std::sqrt(40), 1e-9);
    EXPECT_THAT(
        error_of([&] { clip_grad_norm_(module, 1.0, 0.0); }),
        HasSubstr("expected a positive number or infinity"));
    const double infinity = std::numeric_limits<double>::infinity();
    for (const auto& leaf : parameters(module)) {
      if (leaf.numel() > 0) {
        leaf.mutable_grad().mul_(std::nan(""));
      }
    }
    EXPECT_TRUE(std::isnan(clip_grad_norm_(module, 1.0, infinity)));
  });
}

TEST(FsdpTest, AViewDoesNotOutliveTheShardItShows) {
  on_ranks(1, [](const Group&) {
    at::Tensor view;
    std::weak_ptr<engine::Unit> unit;
    {
      torch::nn::Linear linear(4, 4);
      fully_shard(*linear);
      unit = engine::unit_of(linear->weight)->weak_from_this();
      torch::NoGradGuard no_grad;
      linear->forward(torch::ones({1, 4}));
      view = linear->weight.detach();
    }
    EXPECT_TRUE(unit.expired());
    EXPECT_THAT(error_of([&] { view.sum(); }), HasSubstr("no longer exists"));
  });
}

TEST(FsdpTest, UnshardLastsUntilReshard) {
  on_ranks(2, [](const Group& world) {
    auto module = make_stack();
    shard_blocks(module);
    unshard(*module);
    auto& schedule = *engine::Schedule::of(world);
    schedule.probe_for_tests().counts = {};
    torch::NoGradGuard no_grad;
    loss_of(module, tokens(0, 0));
    EXPECT_EQ(schedule.probe_for_tests().counts.gathers, 0);
    EXPECT_EQ(schedule.probe_for_tests().counts.reshards, 0);
    reshard(*module);
    EXPECT_EQ(schedule.probe_for_tests().counts.reshards, 1 + kDepth);
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

TEST(FsdpTest, AutocastAndScaledGradientsMatchThePlainModel) {
  on_ranks(2, [](const Group& world) {
    torch::manual_seed(5);
    Stack plain(kVocabulary, kWidth, kDepth);
    torch::manual_seed(5);
    Stack module(kVocabulary, kWidth, kDepth);
    shard_blocks(module);
    constexpr double kScale = 1024;
    const auto loss = [&](Stack& model) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      auto value = model->forward(tokens(0, 1)).to(at::kFloat).square().mean();
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      return value;
    };
    auto expected = loss(plain);
    auto actual = loss(module);
    EXPECT_EQ(actual.item<double>(), expected.item<double>());
    (expected * kScale).backward();
    (actual * kScale).backward();
    for (const auto& leaf : parameters(*module)) {
      if (leaf.grad().defined()) {
        leaf.mutable_grad().div_(kScale); // unscale, as a GradScaler does
      }
    }
    for (const auto& parameter : plain->parameters()) {
      parameter.mutable_grad().div_(kScale);
    }
    auto guard = summon_full_params(*module, SummonOptions().with_grads(true));
    const auto theirs = plain->named_parameters();
    for (const auto& [name, parameter] : named_parameters(*module)) {
      EXPECT_TRUE(
          torch::allclose(parameter.grad(), theirs[name].grad(), 1e-5, 1e-7))
          << name;
    }
    guard.close();
    EXPECT_EQ(world.size(), 2);
  });
}

TEST(FsdpTest, ShardedValuesAreThePlainParameters) {
  on_ranks(3, [](const Group&) {
    const auto plain = make_stack();
    const auto theirs = plain->named_parameters();
    const auto check = [&](Stack& module) {
      for (const auto& item : module->named_parameters()) {
        const at::Tensor& face = item.value();
        const ShardedTensor value =
            engine::unit_of(face)->params().sharded(face.unsafeGetTensorImpl());
        EXPECT_TRUE(torch::equal(value.full_tensor(), theirs[item.key()]))
            << item.key();
      }
    };
    for (const auto layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
      auto module = make_stack();
      shard_blocks(module, FullyShardOptions().layout(layout));
      check(module);
    }
    auto module = make_stack();
    const FSDP model(module, by_block());
    check(module);
  });
}

TEST(FsdpTest, TheObserverSeesWhatHappens) {
  on_ranks(2, [](const Group& world) {
    auto module = make_stack();
    shard_blocks(module);
    auto& schedule = *engine::Schedule::of(world);
    std::map<engine::ShardEvent::Kind, int> seen;
    int ahead = 0;
    int64_t gathered = 0;
    schedule.probe_for_tests().observer = [&](const engine::ShardEvent& event) {
      ++seen[event.kind];
      ahead += event.ahead ? 1 : 0;
      gathered +=
          event.kind == engine::ShardEvent::Kind::Gather ? event.bytes : 0;
    };
    using Kind = engine::ShardEvent::Kind;
    for (int step = 0; step < 2; ++step) {
      loss_of(module, tokens(world.rank(), step)).backward();
    }
    schedule.probe_for_tests().observer = nullptr;
    EXPECT_EQ(seen[Kind::Gather], 2 * (1 + 2 * kDepth));
    EXPECT_EQ(seen[Kind::GatherWait], seen[Kind::Gather]);
    EXPECT_EQ(seen[Kind::Reshard], seen[Kind::Gather]);
    EXPECT_EQ(seen[Kind::Reduce], 2 * (1 + kDepth));
    EXPECT_EQ(seen[Kind::ReduceWait], seen[Kind::Reduce]);
    EXPECT_EQ(ahead, 2 * kDepth - 1);
    int64_t block = 0;
    int64_t root = 0;
    for (const FsdpUnit& unit : fsdp_modules(*module)) {
      (unit.is_root() ? root : block) = unit.sharded_numel() * world.size() * 8;
    }
    EXPECT_EQ(gathered, 2 * (root + 2 * kDepth * block));
  });
}

TEST(FsdpErrorsTest, RejectsWhatFsdpOfPythonRejects) {
  on_ranks(2, [](const Group&) {
    const auto error_for = [](const std::function<void(Stack&)>& change,
                              const FSDPOptions& options) {
      auto module = make_stack();
      change(module);
      return error_of([&] { FSDP model(module, options); });
    };
    EXPECT_THAT(
        error_for(
            [](Stack& m) { m->embed->weight.set_requires_grad(false); }, {}),
        HasSubstr(
            "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"));
    EXPECT_EQ(
        error_for(
            [](Stack& m) { m->embed->weight.set_requires_grad(false); },
            FSDPOptions().use_orig_params(true)),
        "nothing was thrown");
    EXPECT_THAT(
        error_for([](Stack& m) { m->embed->to(at::kFloat); }, {}),
        HasSubstr("uniform dtype"));
    EXPECT_THAT(
        error_for(
            [](Stack&) {},
            FSDPOptions().sharding_strategy(ShardingStrategy::HYBRID_SHARD)),
        HasSubstr("device_mesh of two axes"));
    auto module = make_stack();
    const FSDP model(module);
    EXPECT_THAT(
        error_of([&] { fully_shard(*module->blocks->ptr(0)); }),
        HasSubstr("its parameters are sharded already, as part of"));
    EXPECT_THAT(
        error_of([&] { set_requires_grad(module->head, false); }),
        HasSubstr("use_orig_params"));
    module->head.set_requires_grad(false); // behind its back
    EXPECT_THAT(
        error_of([&] { module->head.sum(); }), HasSubstr("use_orig_params"));
    module->head.sum(); // said once, and left as it was
  });
}

TEST(FsdpErrorsTest, OneRankShardsNothing) {
  on_ranks(1, [](const Group&) {
    auto module = make_stack();
    const FSDP model(module);
    EXPECT_EQ(model.sharding_strategy(), ShardingStrategy::NO_SHARD);
    EXPECT_FALSE(fsdp_modules(*model).at(0).uses_sharded_strategy());
  });
}

} // namespace
} // namespace tessera
