// What several ranks have: copies of one tensor, parts that look like copies,
// and values that may differ.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/optim/state_dict.h>
#include <tessera/train/training_state.h>
#include <tessera/transfer/distributed_state_dict.h>
#include <tessera/transfer/model_state.h>
#include <tessera/transfer/state_dict_type.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// Equal parts on two ranks, so that they look like copies.
torch::nn::Sequential make_sharded(ShardLayout layout) {
  torch::manual_seed(1);
  torch::nn::Sequential model(
      torch::nn::Linear(torch::nn::LinearOptions(16, 32).bias(false)));
  fully_shard(*model, FullyShardOptions().layout(layout));
  return model;
}

void make_gradients(torch::nn::Sequential& model) {
  model->forward(torch::ones({4, 16})).square().mean().backward();
}

auto refuses_part(const std::string& name) {
  return AllOf(
      HasSubstr('"' + name + '"'),
      HasSubstr("part of parameter"),
      HasSubstr("over 2 ranks"),
      HasSubstr("tessera::get_state_dict"));
}

/// Nothing is saved on any rank, and all ranks throw the same error.
template <class Matcher>
void expect_refused(
    const Group& world,
    const StateDict& state,
    const Matcher& matcher) {
  const TempFolder folder(world);
  EXPECT_THAT(
      error_of([&] { checkpoint::save(state, folder / "c"); }), matcher);
  EXPECT_THAT(
      error_of([&] { checkpoint::async_save(state, folder / "c").wait(); }),
      matcher);
  world.barrier();
  EXPECT_THAT(names_in(folder.path()), IsEmpty());
}

TEST(CopiesTest, PartsOfOptimizerStateAreRefusedByName) {
  on_ranks(2, [](const Group& world) {
    for (const ShardLayout layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
      auto model = make_sharded(layout);
      optim::AdamW own(parameters(*model), 0.1);
      torch::optim::Adam libtorchs(parameters(*model), 0.1);
      optim::NamedOptimizer named(
          named_parameters(*model),
          std::make_unique<optim::AdamW>(parameters(*model), 0.1));
      make_gradients(model);
      own.step();
      libtorchs.step();
      named.step();
      expect_refused(world, own.state_dict(), refuses_part("state.0.exp_avg"));
      expect_refused(
          world,
          {{"optim", optim::state_dict(libtorchs)}},
          refuses_part("optim.state.0.exp_avg"));
      expect_refused(
          world,
          {{"optim", named.state_dict().clone()}},
          refuses_part("optim.state.0.weight.exp_avg"));
      own.load_state_dict(own.state_dict()); // in memory nothing changes
    }
  });
}

TEST(CopiesTest, PartsOfAModelAreRefusedByName) {
  on_ranks(2, [](const Group& world) {
    auto model = make_sharded(ShardLayout::Flat);
    StateDict leaves;
    for (const auto& [name, leaf] : named_parameters(*model)) {
      leaves.set(name, leaf.detach());
    }
    expect_refused(world, leaves, refuses_part("0.weight"));
    const StateDictTypeGuard guard(*model, StateDictType::LocalStateDict);
    expect_refused(world, state_dict(*model).clone(), refuses_part("0.weight"));
    load_state_dict(*model, state_dict(*model)); // in memory nothing changes
  });
}

TEST(CopiesTest, NothingIsLoadedIntoPartsThatLookLikeCopies) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    auto model = make_sharded(ShardLayout::Flat);
    const at::Tensor leaf = parameters(*model).front();
    const at::Tensor before = leaf.detach().clone();
    checkpoint::save(
        {{"0", StateDict{{"weight", torch::zeros_like(before)}}}},
        folder / "c");
    StateDict target{{"0.weight", leaf.detach()}};
    EXPECT_THAT(
        error_of([&] { checkpoint::load(target, folder / "c"); }),
        refuses_part("0.weight"));
    EXPECT_TRUE(torch::equal(leaf, before));
  });
}

TEST(CopiesTest, PartsOfGradientsAreNotTakenForCopies) {
  on_ranks(2, [](const Group& world) {
    auto model = make_sharded(ShardLayout::Dim0);
    make_gradients(model);
    expect_refused(
        world,
        {{"gradient", parameters(*model).front().grad()}},
        AllOf(
            HasSubstr("\"gradient\": rank 1 against rank 0"),
            HasSubstr("its gradient")));
  });
}

TEST(CopiesTest, OneRankHasItAll) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(16, 32));
    FSDP(model, FSDPOptions().sharding_strategy(ShardingStrategy::NoShard));
    optim::AdamW optimizer(parameters(*model), 0.1);
    make_gradients(model);
    optimizer.step();
    checkpoint::save(optimizer.state_dict(), folder / "c");
    StateDict loaded = optimizer.state_dict().clone();
    checkpoint::load(loaded, folder / "c");
    EXPECT_EQ(diff_state_dicts(loaded, optimizer.state_dict()), "");
  });
}

TEST(CopiesTest, TensorsThatDifferBetweenRanksAreNamedOnEveryRank) {
  on_ranks(3, [](const Group& world) {
    const int rank = world.rank();
    const StateDict state{
        {"same", torch::arange(1000)},
        {"a", torch::full({7}, rank == 1 ? 1.0 : 0.0)},
        {"b", torch::ones({3, 5}).index_put_({2, 4}, rank)},
        {"strided", torch::arange(12).view({3, 4}).t()}};
    expect_refused(
        world,
        state,
        AllOf(
            HasSubstr("\"a\": rank 1 against rank 0"),
            HasSubstr("\"b\": ranks 1, 2 against rank 0"),
            HasSubstr("of_any_rank"),
            Not(HasSubstr("\"same\"")),
            Not(HasSubstr("\"strided\""))));
  });
}

TEST(CopiesTest, ManyThatDifferAreCounted) {
  on_ranks(2, [](const Group& world) {
    StateDict state;
    for (int i = 0; i < 20; ++i) {
      state.set("t" + std::to_string(i), torch::full({2}, world.rank()));
    }
    expect_refused(world, state, HasSubstr("and 12 more"));
  });
}

TEST(CopiesTest, CopiesOfAPartAreComparedToo) {
  on_ranks(4, [](const Group& world) {
    const Group copy = *world.split(world.rank() / 2, world.rank(), "copy");
    const at::Tensor whole = torch::full({8, 2}, world.rank() == 3 ? 1. : 0.);
    expect_refused(
        world,
        {{"w", cut(whole, Cut::Rows, copy)}},
        HasSubstr("\"w\": rank 3 against rank"));
  });
}

TEST(CopiesTest, OfWhatMayDifferTheFirstRanksIsSaved) {
  on_ranks(3, [](const Group& world) {
    const TempFolder folder(world);
    const int rank = world.rank();
    StateDict state{
        {"statistics", StateValue::of_any_rank(torch::full({5}, rank))}};
    if (rank > 0) {
      state.set("late", StateValue::of_any_rank(torch::full({2}, rank)));
    }
    checkpoint::save(state, folder / "c");
    const StateDict read = checkpoint::read(folder / "c");
    EXPECT_TRUE(
        torch::equal(read.at("statistics").tensor(), torch::zeros({5})));
    EXPECT_TRUE(torch::equal(read.at("late").tensor(), torch::ones({2})));
  });
}

TEST(CopiesTest, ADataParallelModelWithBatchNormIsSaved) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    torch::manual_seed(1);
    torch::nn::Sequential model(
        torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
    DistributedDataParallel ddp(model);
    optim::AdamW optimizer(model->parameters(), 0.1);
    torch::manual_seed(world.rank()); // inputs of its own
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      model->forward(torch::randn({5, 4})).square().mean().backward();
      optimizer.step();
    }
    const at::Tensor mean = model->named_buffers()["1.running_mean"].clone();
    const at::Tensor all = torch::empty({2, 3});
    world.all_gather_into(all, mean);
    ASSERT_FALSE(torch::equal(all[0], all[1]));
    TrainingState training(*model, {optimizer});
    checkpoint::save(training, folder / "c");
    EXPECT_TRUE(torch::equal(
        checkpoint::read(folder / "c").at_path("model.1.running_mean").tensor(),
        all[0]));
  });
}

} // namespace
} // namespace tessera
