// The FSDP handle: what its options make of a model, and what users do with it.
#include <tessera/error.h>
#include <tessera/fsdp/fsdp.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "engine/schedule.h"
#include "engine/unit.h"
#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
      for (const FSDPUnit& unit : fsdp_units(*model)) {
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
    const auto units = fsdp_units(*model);
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
      // Containers that are destroyed at once: the next one reuses their
      // address.
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
    // The embedding's weight is also the head of the whole model.
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
    EXPECT_EQ(fsdp_units(*model).size(), 3u);
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
    EXPECT_EQ(ahead, 2 * kDepth);
    int64_t block = 0;
    int64_t root = 0;
    for (const FSDPUnit& unit : fsdp_units(*module)) {
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
            FSDPOptions().sharding_strategy(ShardingStrategy::HybridShard)),
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
    EXPECT_EQ(model.sharding_strategy(), ShardingStrategy::NoShard);
    EXPECT_FALSE(fsdp_units(*model).at(0).uses_sharded_strategy());
  });
}

} // namespace
} // namespace tessera
