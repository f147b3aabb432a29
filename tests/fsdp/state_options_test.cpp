// What the options of state dicts do, and where state may not be taken.
#include <tessera/comm/mesh.h>
#include <tessera/error.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>
#include <tessera/transfer/model_state.h>
#include <tessera/transfer/optim_state.h>
#include <tessera/transfer/state_dict_type.h>

#include "fsdp/state_net.h"
#include "support/memory_meter.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

TEST(StateOptionsTest, ShardedStateLoadsIntoAPlainModelOnTheSameRanks) {
  for (const How how : {How::Flat, How::Orig, How::ShardFlat, How::ShardDim0}) {
    on_ranks(2, [how](const Group&) {
      auto net = make(how);
      auto optim = train(*net);
      const auto state = get_state_dict(*net, {optim});
      StateNet plain;
      optim::Adam plain_optim(plain.parameters(), 0.5);
      set_state_dict(plain, {plain_optim}, state);
      EXPECT_EQ(
          diff_state_dicts(
              state_dict(plain), get_model_state_dict(*net, kFull)),
          "");
      EXPECT_EQ(
          diff_state_dicts(
              get_optimizer_state_dict(plain, {plain_optim}).at("state").dict(),
              get_optimizer_state_dict(*net, {optim}, kFull)
                  .at("state")
                  .dict()),
          "");
    });
  }
}

/// Rank 0's errors reach ranks that have nothing of their own to find wrong.
TEST(StateOptionsTest, WhatRank0SendsIsCheckedForAll) {
  on_ranks(2, [](const Group& world) {
    const auto from_rank0 =
        StateDictOptions().full_state_dict(true).broadcast_from_rank0(true);
    auto net = make(How::Orig);
    auto optim = train(*net);
    StateNet plain;
    optim::Adam plain_optim(plain.parameters(), 0.5);
    const auto sharded = get_state_dict(*net, {optim});
    const auto full = get_state_dict(*net, {optim}, kFull);
    const auto only_on_0 = [&](const StateDict& dict) {
      return world.rank() == 0 ? dict : StateDict();
    };
    EXPECT_THROW(
        set_model_state_dict(*net, only_on_0(sharded.model), from_rank0),
        c10::ValueError);
    EXPECT_THROW(
        set_optimizer_state_dict(
            *net, {optim}, only_on_0(sharded.optimizer), from_rank0),
        c10::ValueError);
    EXPECT_THROW(
        (void)scatter_full_optim_state_dict(
            only_on_0(sharded.optimizer),
            *net,
            LoadOptimStateOptions().optim(optim)),
        c10::ValueError);
    EXPECT_ANY_THROW(set_model_state_dict(plain, {}, from_rank0));
    EXPECT_ANY_THROW(
        set_optimizer_state_dict(plain, {plain_optim}, {}, from_rank0));
    StateDict bad = full.optimizer.clone();
    bad.at("state").dict().set("stranger", StateDict());
    EXPECT_THROW(
        set_optimizer_state_dict(
            plain, {plain_optim}, only_on_0(bad), from_rank0),
        c10::ValueError);
    set_optimizer_state_dict(
        plain, {plain_optim}, only_on_0(full.optimizer), from_rank0);
    set_model_state_dict(plain, only_on_0(full.model), from_rank0);
    EXPECT_EQ(diff_state_dicts(state_dict(plain), full.model), "");
  });
}

TEST(StateOptionsTest, OptionsThatDifferBetweenRanksAreRefused) {
  on_ranks(2, [](const Group& world) {
    auto net = make(How::Orig);
    auto optim = train(*net);
    StateDict osd = get_optimizer_state_dict(*net, {optim}, kFull).clone();
    osd.at("param_groups")
        .list()
        .front()
        .dict()
        .set("lr", world.rank() == 0 ? 0.5 : 0.25);
    EXPECT_THROW(
        set_optimizer_state_dict(*net, {optim}, osd, kFull), DisagreementError);
  });
}

/// Copies of the model, and a rank 0 that is not in the first of them.
TEST(StateOptionsTest, ScatteringReachesEveryCopy) {
  on_ranks(4, [](const Group& world) {
    const Mesh mesh(world, {2, 2});
    auto net = std::make_shared<StateNet>();
    FSDP<torch::nn::Module>(
        net,
        FSDPOptions()
            .sharding_strategy(ShardingStrategy::HybridShard)
            .device_mesh(mesh));
    auto optim = train(*net);
    const StateDict full = full_optim_state_dict(
        *net, optim, FullOptimStateOptions().rank0_only(false));
    const auto reversed = world.subgroup({3, 2, 1, 0});
    const StateDict loaded = scatter_full_optim_state_dict(
        reversed->rank() == 0 ? std::optional(full) : std::nullopt,
        *net,
        LoadOptimStateOptions().optim(optim).group(reversed));
    EXPECT_EQ(diff_state_dicts(loaded, optim::state_dict(optim)), "");
  });
}

TEST(StateOptionsTest, ARank0OutsideOfAUnitsGroupIsRefused) {
  on_ranks(4, [](const Group& world) {
    auto net = std::make_shared<StateNet>();
    const auto half = world.split(world.rank() / 2);
    fully_shard(*net->a, FullyShardOptions().group(*half));
    fully_shard(*net);
    const StateDict full = get_model_state_dict(*net, kFull);
    EXPECT_THROW(
        set_model_state_dict(
            *net,
            world.rank() == 0 ? full : StateDict(),
            StateDictOptions().full_state_dict(true).broadcast_from_rank0(
                true)),
        c10::ValueError);
    EXPECT_EQ(diff_state_dicts(get_model_state_dict(*net, kFull), full), "");
  });
}

TEST(StateOptionsTest, NamesWithoutPrefixesMustStayApart) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::Orig);
    EXPECT_THROW(
        (void)get_model_state_dict(
            *net,
            StateDictOptions().keep_submodule_prefixes(false),
            {*net->a, *net->b}),
        c10::ValueError);
  });
}

TEST(StateOptionsTest, SubmodulesWithAndWithoutTheirPrefixes) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::ShardDim0);
    auto optim = train(*net);
    const ModuleRefs only_a{*net->a};
    EXPECT_EQ(
        get_model_state_dict(*net, {}, only_a).keys(),
        (std::vector<StateKey>{"a.weight", "a.bias"}));
    const auto bare = StateDictOptions().keep_submodule_prefixes(false);
    EXPECT_EQ(
        get_model_state_dict(*net, bare, only_a).keys(),
        (std::vector<StateKey>{"weight", "bias"}));
    const StateDict osd = get_optimizer_state_dict(*net, {optim}, {}, only_a);
    EXPECT_EQ(
        osd.at("state").dict().keys(),
        (std::vector<StateKey>{"a.weight", "a.bias"}));
    EXPECT_THAT(
        error_of([&] {
          torch::nn::Linear stranger(1, 1);
          (void)get_model_state_dict(*net, {}, {*stranger});
        }),
        HasSubstr("is not in the model"));
  });
}

TEST(StateOptionsTest, FrozenParametersCanBeLeftOut) {
  on_ranks(2, [](const Group&) {
    auto net = std::make_shared<StateNet>();
    net->a->weight.set_requires_grad(false);
    fully_shard(*net);
    const auto options = StateDictOptions().ignore_frozen_params(true);
    const StateDict dict = get_model_state_dict(*net, options).clone();
    EXPECT_FALSE(dict.contains("a.weight"));
    EXPECT_TRUE(dict.contains("a.bias"));
    EXPECT_NO_THROW(set_model_state_dict(*net, dict, options));
    StateDict no_buffer = dict;
    no_buffer.erase("seen");
    EXPECT_THROW(
        set_model_state_dict(*net, no_buffer, options), c10::ValueError);
    EXPECT_THAT(
        error_of([&] { set_model_state_dict(*net, dict); }),
        HasSubstr("missing \"a.weight\""));
  });
}

TEST(StateOptionsTest, ADictionaryFlattenedAsPythonDoesComesBack) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::Orig);
    auto optim = train(*net);
    const auto options = StateDictOptions().flatten_optimizer_state_dict(true);
    const StateDict flat =
        get_optimizer_state_dict(*net, {optim}, options).clone();
    EXPECT_TRUE(flat.contains("state.a.weight.exp_avg"));
    EXPECT_DOUBLE_EQ(flat.at("param_groups.b.bias.lr").to_double(), 0.01);
    auto other = make(How::Orig);
    auto other_optim = train(*other, 1);
    set_optimizer_state_dict(*other, {other_optim}, flat, options);
    EXPECT_EQ(
        diff_state_dicts(
            optim::state_dict(other_optim), optim::state_dict(optim)),
        "");
  });
}

TEST(StateOptionsTest, OptionsThatExcludeEachOtherAreRefused) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::Orig);
    EXPECT_THAT(
        error_of([&] {
          set_model_state_dict(
              *net, {}, StateDictOptions().broadcast_from_rank0(true));
        }),
        HasSubstr("needs full_state_dict"));
    EXPECT_THROW(
        set_state_dict_type(
            *net, StateDictType::FullStateDict, ShardedStateDictConfig()),
        c10::ValueError);
    set_state_dict_type(*net->a, StateDictType::ShardedStateDict);
    EXPECT_THROW((void)get_state_dict_type(*net), c10::ValueError);
    EXPECT_THROW((void)state_dict(*net), c10::ValueError);
    torch::nn::Linear plain(2, 2);
    EXPECT_THROW((void)get_state_dict_type(*plain), c10::ValueError);
  });
}

TEST(StateOptionsTest, InsideSummonItIsRefused) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::Orig);
    const auto guard = summon_full_params(*net);
    EXPECT_THAT(
        error_of([&] { (void)state_dict(*net); }),
        HasSubstr("Close the guard"));
    EXPECT_THAT(
        error_of([&] { (void)get_model_state_dict(*net); }),
        HasSubstr("Close the guard"));
  });
}

TEST(StateOptionsTest, APlainModuleHasStateToo) {
  StateNet net;
  const StateDict dict = state_dict(net);
  EXPECT_EQ(
      dict.keys(),
      (std::vector<StateKey>{
          "scale", "seen", "a.weight", "a.bias", "b.weight", "b.bias"}));
  StateNet other;
  {
    at::NoGradGuard no_grad;
    other.scale.fill_(7);
    other.seen.fill_(7);
  }
  load_state_dict(other, dict);
  EXPECT_TRUE(other.scale.equal(net.scale));
  EXPECT_TRUE(other.seen.equal(net.seen));
  EXPECT_THROW(load_state_dict(other, StateDict()), c10::ValueError);
}

/// The memory that full state on rank 0 costs beyond the result itself.
TEST(StateOptionsTest, FullStateNeedsTheResultAndNothingBesideIt) {
  on_ranks(2, [](const Group& world) {
    constexpr int64_t kWidth = 256;
    constexpr int kLayers = 8;
    constexpr double kUnitBytes = kWidth * kWidth * 4.0;
    torch::nn::Sequential net;
    for (int i = 0; i < kLayers; ++i) {
      net->push_back(torch::nn::Linear(
          torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
      FSDP<torch::nn::Module>(net->ptr(i));
    }
    FSDP<torch::nn::Module>(net.ptr());
    optim::Adam optim(parameters(*net), 0.01);
    net->forward(torch::ones({1, kWidth})).sum().backward();
    optim.step();
    optim.zero_grad();
    MemoryMeter meter;
    const double result = world.rank() == 0 ? 2 * kLayers * kUnitBytes : 0;
    {
      const StateDict state = full_optim_state_dict(*net, optim);
      EXPECT_LE(static_cast<double>(meter.peak_bytes()), result + kUnitBytes);
      EXPECT_GE(static_cast<double>(meter.live_bytes()), result);
    }
    meter.reset_peak();
    {
      const StateDict model = get_model_state_dict(
          *net, StateDictOptions().full_state_dict(true).cpu_offload(true));
      EXPECT_LE(
          static_cast<double>(meter.peak_bytes()), result / 2 + kUnitBytes);
    }
    meter.reset_peak();
    const StateDict sharded = sharded_optim_state_dict(*net, optim);
    EXPECT_LE(static_cast<double>(meter.peak_bytes()), kUnitBytes / 8);
  });
}

} // namespace
} // namespace tessera
