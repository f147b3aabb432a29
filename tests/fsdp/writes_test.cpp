// Writes to shards that operators do not show: every one makes the units of the
// model stale, on every rank, or is refused.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/error.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adagrad.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/rmsprop.h>
#include <tessera/optim/sgd.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <functional>
#include <memory>
#include <thread>

#include "checkpoint/support.h"
#include "comm/group/group_impl.h"
#include "engine/unit.h"
#include "fsdp/training.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<at::Tensor>)>;

struct OptimizerCase {
  const char* name;
  MakeOptimizer make;
};

template <class Optimizer, class Options>
MakeOptimizer made_by() {
  return [](std::vector<at::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), Options(0.1));
  };
}

std::vector<OptimizerCase> optimizers() {
  return {
      {"AdamW", made_by<optim::AdamW, optim::AdamWOptions>()},
      {"Adam", made_by<optim::Adam, optim::AdamOptions>()},
      {"SGD", made_by<optim::SGD, optim::SGDOptions>()},
      {"RMSprop", made_by<optim::RMSprop, optim::RMSpropOptions>()},
      {"Adagrad", made_by<optim::Adagrad, optim::AdagradOptions>()},
      {"TorchAdamW",
       made_by<torch::optim::AdamW, torch::optim::AdamWOptions>()},
      {"TorchSGD", made_by<torch::optim::SGD, torch::optim::SGDOptions>()},
      {"TorchRMSprop",
       made_by<torch::optim::RMSprop, torch::optim::RMSpropOptions>()}};
}

torch::nn::Linear three_rows() {
  torch::manual_seed(5);
  return torch::nn::Linear(torch::nn::LinearOptions(2, 3).bias(false));
}

/// Values of `model` after one step whose unit was Full when it came.
at::Tensor after_a_step(
    torch::nn::Linear& model,
    torch::optim::Optimizer& optimizer) {
  const at::Tensor x = torch::ones({1, 2});
  model->forward(x).square().sum().backward();
  {
    torch::NoGradGuard no_grad;
    model->forward(x); // the root stays Full
    optimizer.step();
    return model->forward(x).detach().clone();
  }
}

class StepTest
    : public ::testing::TestWithParam<std::tuple<OptimizerCase, ShardLayout>> {
};

/// Four ranks share three rows, or fewer elements than ranks: one rank has no
/// element of the model, and its optimizer nothing to do.
TEST_P(StepTest, ARankWithoutElementsSeesTheStep) {
  on_ranks(4, [](const Group&) {
    const auto& [optimizer, layout] = GetParam();
    auto plain = three_rows();
    auto plain_optimizer = optimizer.make(plain->parameters());
    const at::Tensor expected = after_a_step(plain, *plain_optimizer);

    auto model = three_rows();
    if (layout == ShardLayout::Flat) { // 3 elements; the pad is on rank 3
      model = torch::nn::Linear(torch::nn::LinearOptions(1, 3).bias(false));
    }
    fully_shard(*model, FullyShardOptions().layout(layout));
    auto sharded = optimizer.make(parameters(*model));
    if (layout == ShardLayout::Dim0) {
      EXPECT_TRUE(
          torch::allclose(after_a_step(model, *sharded), expected, 1e-5, 1e-6));
      return;
    }
    const at::Tensor x = torch::ones({1, 1});
    model->forward(x).square().sum().backward();
    torch::NoGradGuard no_grad;
    const at::Tensor before = model->forward(x).clone();
    sharded->step();
    const at::Tensor after = model->forward(x).clone();
    EXPECT_FALSE(torch::allclose(before, after));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Optimizers,
    StepTest,
    ::testing::Combine(
        ::testing::ValuesIn(optimizers()),
        ::testing::Values(ShardLayout::Dim0, ShardLayout::Flat)),
    [](const auto& test) {
      return std::string(std::get<0>(test.param).name) +
          (std::get<1>(test.param) == ShardLayout::Dim0 ? "Dim0" : "Flat");
    });

struct LoadCase {
  const char* name;
  std::function<void(torch::nn::Linear&)> shard;
};

std::vector<LoadCase> load_cases() {
  const auto with = [](FullyShardOptions options) {
    return
        [options](torch::nn::Linear& module) { fully_shard(*module, options); };
  };
  const auto by_strategy = [](ShardingStrategy strategy) {
    return [strategy](torch::nn::Linear& module) {
      // The handle may go: the units belong to the module.
      const FSDP handle(
          module,
          FSDPOptions().sharding_strategy(strategy).use_orig_params(true));
    };
  };
  return {
      {"Default", with(FullyShardOptions())},
      {"Dim0", with(FullyShardOptions().layout(ShardLayout::Dim0))},
      {"NoReshard", with(FullyShardOptions().reshard_after_forward(false))},
      {"Bfloat16",
       with(FullyShardOptions().mp_policy(
           MixedPrecisionPolicy().param_dtype(at::kBFloat16)))},
      {"KeptCasts",
       with(FullyShardOptions().mp_policy(MixedPrecisionPolicy()
                                              .param_dtype(at::kBFloat16)
                                              .keep_cast_shards(true)))},
      {"KeptCastsDim0NoReshard",
       with(FullyShardOptions()
                .layout(ShardLayout::Dim0)
                .reshard_after_forward(false)
                .mp_policy(MixedPrecisionPolicy()
                               .param_dtype(at::kBFloat16)
                               .keep_cast_shards(true)))},
      {"FullShard", by_strategy(ShardingStrategy::FullShard)},
      {"ShardGradOp", by_strategy(ShardingStrategy::ShardGradOp)},
      {"NoShard", by_strategy(ShardingStrategy::NoShard)}};
}

class LoadInPlaceTest : public ::testing::TestWithParam<LoadCase> {};

/// As in a loop that evaluates one checkpoint after another: one dictionary,
/// taken once, is loaded into while the units are Full.
TEST_P(LoadInPlaceTest, AFullUnitIsGatheredAgain) {
  on_ranks(4, [](const Group& world) {
    const TempFolder folder(world);
    auto model = three_rows();
    const at::Tensor x = torch::ones({1, 2});
    GetParam().shard(model);
    auto state = get_model_state_dict(*model);
    checkpoint::save(state, folder / "one");
    torch::NoGradGuard no_grad;
    const at::Tensor one = model->forward(x).clone();
    for (at::Tensor& leaf : parameters(*model)) {
      leaf.mul_(2);
    }
    checkpoint::save(state, folder / "two");
    const at::Tensor two = model->forward(x).clone();
    EXPECT_TRUE(torch::equal(two, one * 2));

    checkpoint::load(state, folder / "one");
    EXPECT_TRUE(torch::equal(model->forward(x), one));
    checkpoint::load(state, folder / "two");
    EXPECT_TRUE(torch::equal(model->forward(x), two));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shardings,
    LoadInPlaceTest,
    ::testing::ValuesIn(load_cases()),
    [](const auto& test) { return test.param.name; });

TEST(RawWriteTest, LoadingWithACastIsSeenToo) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    auto model = three_rows();
    model->to(torch::kDouble);
    auto floats = three_rows();
    if (world.rank() == 0) {
      checkpoint::save(
          {{"weight", floats->weight.detach() * 3}},
          folder / "floats",
          checkpoint::SaveOptions().group(world.alone()));
    }
    world.barrier();
    fully_shard(*model);
    auto state = get_model_state_dict(*model);
    const at::Tensor x = torch::ones({1, 2}, torch::kDouble);
    torch::NoGradGuard no_grad;
    const at::Tensor before = model->forward(x).clone();
    checkpoint::load(
        state,
        folder / "floats",
        checkpoint::LoadOptions().cast(true).threads(4));
    EXPECT_TRUE(torch::allclose(model->forward(x), before * 3, 1e-6, 1e-6));
  });
}

TEST(RawWriteTest, LoadingIntoGatheredParametersIsRefusedByName) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    auto model = three_rows();
    checkpoint::save({{"weight", model->weight.detach()}}, folder / "plain");
    fully_shard(*model);
    torch::NoGradGuard no_grad;
    const at::Tensor x = torch::ones({1, 2});
    const at::Tensor before = model->forward(x).clone();
    StateDict target;
    for (const auto& item : model->named_parameters()) {
      target.set(item.key(), item.value());
    }
    const std::string error =
        error_of([&] { checkpoint::load(target, folder / "plain"); });
    EXPECT_THAT(error, HasSubstr("nothing was loaded"));
    EXPECT_THAT(error, HasSubstr("\"weight\""));
    EXPECT_THAT(error, HasSubstr("summon_full_params"));
    EXPECT_TRUE(torch::equal(model->forward(x), before));
  });
}

TEST(RawWriteTest, CollectivesThatWriteToAShardedParameterAreRefused) {
  on_ranks(2, [](const Group& world) {
    auto model = three_rows();
    fully_shard(*model);
    const at::Tensor& weight = model->weight;
    torch::NoGradGuard no_grad;
    const auto refused = [&](const std::function<void()>& call) {
      return error_of(call).find("would be lost at the next reshard") !=
          std::string::npos;
    };
    for (const bool is_full : {false, true}) {
      SCOPED_TRACE(is_full ? "full" : "sharded");
      (is_full ? unshard : reshard)(*model);
      const at::Tensor six = torch::zeros({6});
      const at::Tensor three = torch::zeros({3});
      const at::Tensor twelve = torch::zeros({12});
      EXPECT_TRUE(refused([&] { world.all_reduce(weight, ReduceOp::Sum); }));
      EXPECT_TRUE(refused([&] { world.broadcast(weight, 0); }));
      EXPECT_TRUE(refused([&] { world.all_gather_into(weight, three); }));
      EXPECT_TRUE(refused(
          [&] { world.reduce_scatter(weight, twelve, ReduceOp::Sum); }));
      EXPECT_TRUE(refused([&] { world.all_to_all(weight, six); }));
      EXPECT_TRUE(refused([&] { world.reduce(weight, 0); }));
      EXPECT_TRUE(refused([&] { world.scatter(weight, twelve, 0); }));
      EXPECT_TRUE(refused([&] { world.recv(weight, 1 - world.rank()); }));
      EXPECT_TRUE(refused(
          [&] { world.all_reduce_async(weight, ReduceOp::Sum).wait(); }));
    }
  });
}

TEST(RawWriteTest, ACollectiveThatReadsAShardedParameterGathersIt) {
  on_ranks(2, [](const Group& world) {
    auto model = three_rows();
    const at::Tensor expected = model->weight.detach().clone();
    fully_shard(*model);
    const at::Tensor all = torch::zeros({2, 3, 2});
    world.all_gather_into(all, model->weight);
    EXPECT_TRUE(torch::equal(all[0], expected));
    EXPECT_TRUE(torch::equal(all[1], expected));
    reshard(*model);
    const at::Tensor received = torch::zeros({3, 2});
    auto send = world.send_async(model->weight, 1 - world.rank());
    world.recv(received, 1 - world.rank());
    send.wait();
    EXPECT_TRUE(torch::equal(received, expected));
  });
}

TEST(RawWriteTest, ACollectiveThatWritesToAShardIsSeen) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Linear model( // both ranks have as many elements
        torch::nn::LinearOptions(16, 16).bias(false));
    fully_shard(*model);
    const at::Tensor x = torch::ones({1, 16});
    torch::NoGradGuard no_grad;
    const at::Tensor before = model->forward(x).clone();
    world.all_reduce(parameters(*model).front(), ReduceOp::Sum);
    EXPECT_FALSE(torch::allclose(model->forward(x), before));
  });
}

TEST(RawWriteTest, AWriteToTheFlatParameterIsSeen) {
  on_ranks(2, [](const Group&) {
    auto model = three_rows();
    const FSDP<torch::nn::LinearImpl> fsdp(
        model.ptr(), FSDPOptions().use_orig_params(true));
    const at::Tensor x = torch::ones({1, 2});
    const torch::NoGradGuard no_grad;
    const at::Tensor before = model->forward(x).clone();
    fsdp_units(*model).front().flat_param().mul_(2);
    EXPECT_TRUE(torch::allclose(model->forward(x), 2 * before));
  });
}

/// As a program calls them on a process group of its own.
TEST(RawWriteTest, CollectivesOfC10dAreSeenOrRefused) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Linear model(torch::nn::LinearOptions(16, 16).bias(false));
    fully_shard(*model);
    const at::Tensor x = torch::ones({1, 16});
    const torch::NoGradGuard no_grad;
    const at::Tensor before = model->forward(x).clone();
    const auto group = world.impl().process_group();
    std::vector<at::Tensor> leaf{parameters(*model).front()};
    group->allreduce(leaf)->wait();
    const at::Tensor after = model->forward(x).clone();
    EXPECT_FALSE(torch::allclose(after, before));
    std::vector<at::Tensor> weight{model->weight};
    EXPECT_THAT(
        error_of([&] { group->allreduce(weight)->wait(); }),
        HasSubstr("would be lost at the next reshard"));
    std::vector<std::vector<at::Tensor>> all{
        {torch::zeros({16, 16}), torch::zeros({16, 16})}};
    group->allgather(all, weight)->wait(); // reads it
    EXPECT_TRUE(torch::equal(model->forward(x), after));
  });
}

TEST(RawWriteTest, WritesAreCountedFromSeveralThreads) {
  on_ranks(1, [](const Group&) {
    auto model = three_rows();
    fully_shard(*model);
    const engine::Unit* unit = engine::unit_of(model->weight);
    const at::Tensor leaf = parameters(*model).front();
    const int64_t before = unit->num_writes();
    constexpr int kThreads = 4;
    constexpr int kWrites = 2000;
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([&] {
          torch::NoGradGuard no_grad;
          for (int write = 0; write < kWrites; ++write) {
            leaf.narrow(0, 0, 0).zero_();
          }
        });
      }
    }
    EXPECT_EQ(unit->num_writes() - before, kThreads * kWrites);
  });
}

} // namespace
} // namespace tessera
