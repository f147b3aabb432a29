// State dicts of models and optimizers: what they hold, what they refuse.
#include <tessera/comm/mesh.h>
#include <tessera/error.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/optim/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>
#include <tessera/transfer/model_state.h>
#include <tessera/transfer/optim_state.h>
#include <tessera/transfer/state_dict_type.h>

#include "fsdp/training.h"
#include "support/memory_meter.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

const auto kFull = StateDictOptions().full_state_dict(true);

/// Two units and a parameter of the root, with a buffer.
struct Net : torch::nn::Module {
  Net() {
    torch::manual_seed(3);
    a = register_module("a", torch::nn::Linear(5, 7));
    b = register_module("b", torch::nn::Linear(7, 3));
    scale = register_parameter("scale", torch::randn({3}));
    seen = register_buffer("seen", torch::zeros({2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen.add_(1);
    return b(torch::relu(a(x))) * scale;
  }

  torch::nn::Linear a{nullptr};
  torch::nn::Linear b{nullptr};
  at::Tensor scale;
  at::Tensor seen;
};

enum class How { Flat, Orig, ShardFlat, ShardDim0 };

std::shared_ptr<Net> make(How how) {
  auto net = std::make_shared<Net>();
  const auto wrap = [&](const std::shared_ptr<torch::nn::Module>& module) {
    if (how == How::Flat || how == How::Orig) {
      FSDP<torch::nn::Module>(
          module, FSDPOptions().use_orig_params(how == How::Orig));
    } else {
      fully_shard(
          *module,
          FullyShardOptions().layout(
              how == How::ShardDim0 ? ShardLayout::Dim0 : ShardLayout::Flat));
    }
  };
  wrap(net->a.ptr());
  wrap(net->b.ptr());
  wrap(net);
  return net;
}

optim::Adam train(Net& net, int steps = 2) {
  optim::Adam optim(parameters(net), 0.01);
  for (int step = 0; step < steps; ++step) {
    net.forward(torch::ones({4, 5})).square().sum().backward();
    optim.step();
    optim.zero_grad();
  }
  return optim;
}

class StateOfTest : public ::testing::TestWithParam<How> {};

TEST_P(StateOfTest, EveryTypeComesBackAsItWas) {
  on_ranks(2, [](const Group&) {
    auto net = make(GetParam());
    auto optim = train(*net);
    const StateDict before = get_model_state_dict(*net, kFull).clone();
    for (const auto type :
         {StateDictType::FullStateDict,
          StateDictType::LocalStateDict,
          StateDictType::ShardedStateDict}) {
      const StateDictTypeGuard guard(*net, type);
      const StateDict model = state_dict(*net).clone();
      const StateDict state = optim_state_dict(*net, optim).clone();
      EXPECT_TRUE(model.contains("seen"));
      auto other = make(GetParam());
      auto other_optim = train(*other, 1);
      const StateDictTypeGuard other_guard(*other, type);
      const auto keys = load_state_dict(*other, model);
      EXPECT_TRUE(keys.missing.empty() && keys.unexpected.empty());
      optim_state_dict_to_load(
          *other,
          other_optim,
          state,
          OptimStateToLoadOptions().load_directly(true));
      EXPECT_EQ(
          diff_state_dicts(get_model_state_dict(*other, kFull), before), "");
      EXPECT_EQ(
          diff_state_dicts(
              optim::state_dict(other_optim), optim::state_dict(optim)),
          "");
    }
  });
}

TEST_P(StateOfTest, GettingChangesNothing) {
  on_ranks(2, [](const Group&) {
    auto net = make(GetParam());
    auto optim = train(*net);
    net->forward(torch::ones({4, 5})).sum().backward();
    std::vector<at::Tensor> before;
    for (const at::Tensor& leaf : parameters(*net)) {
      before.push_back(leaf.detach().clone());
      before.push_back(
          leaf.grad().defined() ? leaf.grad().clone() : at::Tensor());
    }
    (void)state_dict(*net);
    (void)get_state_dict(*net, {optim});
    (void)get_state_dict(*net, {optim}, kFull);
    (void)full_optim_state_dict(*net, optim);
    size_t next = 0;
    for (const at::Tensor& leaf : parameters(*net)) {
      EXPECT_TRUE(leaf.detach().equal(before[next++]));
      const at::Tensor& grad = before[next++];
      ASSERT_EQ(leaf.grad().defined(), grad.defined());
      EXPECT_TRUE(!grad.defined() || leaf.grad().equal(grad));
    }
  });
}

TEST_P(StateOfTest, AFreshOptimizerGetsZeroMomentsAndParametersStay) {
  on_ranks(2, [](const Group&) {
    auto net = make(GetParam());
    optim::Adam optim(parameters(*net), 0.01);
    const StateDict before = get_model_state_dict(*net, kFull).clone();
    const StateDict state = get_optimizer_state_dict(*net, {optim}, kFull);
    EXPECT_EQ(diff_state_dicts(get_model_state_dict(*net, kFull), before), "");
    const StateDict& entry = state.at("state").dict().at("a.weight").dict();
    EXPECT_EQ(entry.at("step").tensor().item<float>(), 1);
    EXPECT_EQ(entry.at("exp_avg").tensor().abs().sum().item<float>(), 0);
    for (const at::Tensor& leaf : parameters(*net)) {
      EXPECT_FALSE(leaf.grad().defined());
    }
  });
}

TEST_P(StateOfTest, WritingToShardedValuesWritesToTheModel) {
  on_ranks(2, [](const Group&) {
    auto net = make(GetParam());
    (void)net->forward(torch::ones({4, 5})); // units have been gathered once
    for (const StateDict& dict : {get_model_state_dict(*net), [&] {
                                    const StateDictTypeGuard guard(
                                        *net, StateDictType::ShardedStateDict);
                                    return state_dict(*net);
                                  }()}) {
      at::NoGradGuard no_grad;
      for (const auto& piece : dict.at("a.weight").sharded().pieces()) {
        piece.tensor.fill_(0.25);
      }
      for (const auto& piece : dict.at("a.bias").sharded().pieces()) {
        piece.tensor.zero_();
      }
      const auto out = net->a(torch::ones({1, 5}));
      EXPECT_TRUE(out.equal(torch::full({1, 7}, 1.25)));
      for (const auto& piece : dict.at("a.weight").sharded().pieces()) {
        piece.tensor.fill_(1);
      }
      EXPECT_TRUE(net->a(torch::ones({1, 5})).equal(torch::full({1, 7}, 5.)));
    }
  });
}

TEST_P(StateOfTest, AllMissingAndUnexpectedKeysAreNamedAndNothingIsWritten) {
  on_ranks(2, [](const Group&) {
    auto net = make(GetParam());
    const StateDict before = get_model_state_dict(*net, kFull).clone();
    StateDict dict;
    for (const auto& [key, value] : before) {
      dict.set(
          key.name() == "a.bias"         ? "a.bais"
              : key.name() == "b.weight" ? "c.weight"
                                         : key.name(),
          value.tensor() + 1);
    }
    const std::string error =
        error_of([&] { set_model_state_dict(*net, dict, kFull); });
    EXPECT_THAT(
        error, HasSubstr("missing \"a.bias\". Did you mean \"a.bais\"?"));
    EXPECT_THAT(error, HasSubstr("missing \"b.weight\""));
    EXPECT_THAT(
        error, HasSubstr("unexpected \"a.bais\". Did you mean \"a.bias\"?"));
    EXPECT_THAT(error, HasSubstr("unexpected \"c.weight\""));
    EXPECT_THAT(
        error_of([&] { load_state_dict(*net, dict); }), HasSubstr("a.bias"));
    EXPECT_EQ(diff_state_dicts(get_model_state_dict(*net, kFull), before), "");
    const auto keys = set_model_state_dict(
        *net, dict, StateDictOptions().full_state_dict(true).strict(false));
    EXPECT_EQ(keys.missing, (std::vector<std::string>{"a.bias", "b.weight"}));
    EXPECT_EQ(
        keys.unexpected, (std::vector<std::string>{"a.bais", "c.weight"}));
  });
}

TEST_P(StateOfTest, AShapeThatDiffersOnOneRankFailsOnAll) {
  on_ranks(2, [](const Group& world) {
    auto net = make(GetParam());
    const StateDict before = get_model_state_dict(*net, kFull).clone();
    StateDict dict = before.clone();
    dict.at("a.weight").tensor().fill_(9);
    if (world.rank() == 1) {
      dict.set("b.bias", torch::zeros({4}));
    }
    EXPECT_THAT(
        error_of([&] { load_state_dict(*net, dict); }),
        ::testing::AllOf(HasSubstr("b.bias"), HasSubstr("[4], the model [3]")));
    EXPECT_EQ(diff_state_dicts(get_model_state_dict(*net, kFull), before), "");
  });
}

TEST_P(StateOfTest, ADictionaryOfAnotherKindOnOneRankFailsOnAll) {
  on_ranks(2, [](const Group& world) {
    auto net = make(GetParam());
    auto optim = train(*net);
    StateDict full = get_model_state_dict(*net, kFull).clone();
    const StateDict sharded = get_model_state_dict(*net).clone();
    const StateDict& mine = world.rank() == 0 ? full : sharded;
    EXPECT_THAT(
        error_of([&] { load_state_dict(*net, mine); }),
        ::testing::AllOf(HasSubstr("full"), HasSubstr("sharded")));
    // An optimizer's, where a count of steps differs.
    StateDict osd = full_optim_state_dict(
        *net, optim, FullOptimStateOptions().rank0_only(false));
    if (world.rank() == 1) {
      for (const auto& [key, entry] : osd.at("state").dict()) {
        entry.dict().at("step").tensor().add_(1);
      }
    }
    const StateDictTypeGuard guard(*net, StateDictType::FullStateDict);
    EXPECT_THROW(optim_state_dict_to_load(*net, optim, osd), DisagreementError);
  });
}

TEST_P(StateOfTest, BadOptimizerStateIsRefusedOnAllRanksAndNothingIsLoaded) {
  on_ranks(2, [](const Group& world) {
    auto net = make(GetParam());
    auto optim = train(*net);
    const StateDict good =
        get_optimizer_state_dict(*net, {optim}, kFull).clone();
    const StateDict before = optim::state_dict(optim).clone();
    const auto expect_refused =
        [&](const std::function<void(StateDict&)>& spoil,
            const std::string& text) {
          StateDict bad = good.clone();
          for (const auto& [key, entry] : bad.at("state").dict()) {
            entry.dict().at("exp_avg").tensor().add_(1);
          }
          spoil(bad);
          EXPECT_THAT(
              error_of(
                  [&] { set_optimizer_state_dict(*net, {optim}, bad, kFull); }),
              HasSubstr(text));
          EXPECT_EQ(diff_state_dicts(optim::state_dict(optim), before), "")
              << text;
        };
    const auto state = [](StateDict& dict) -> StateDict& {
      return dict.at("state").dict();
    };
    expect_refused(
        [&](StateDict& bad) { state(bad).set("a.wieght", StateDict()); },
        "Did you mean \"state.a.weight\"?");
    expect_refused(
        [&](StateDict& bad) { state(bad).set(0, StateDict()); },
        "the number 0 as a key");
    expect_refused(
        [&](StateDict& bad) { bad.erase("param_groups"); },
        "no \"param_groups\"");
    expect_refused(
        [&](StateDict& bad) { bad.set("more", 1); }, "unknown key \"more\"");
    expect_refused(
        [&](StateDict& bad) {
          state(bad).at("a.weight").dict().set("exp_avg", torch::zeros({2}));
        },
        "has the shape [2], the parameter [7, 5]");
    expect_refused(
        [&](StateDict& bad) {
          StateList& groups = bad.at("param_groups").list();
          groups.push_back(groups.front());
        },
        "is in two groups");
    expect_refused(
        [&](StateDict& bad) {
          auto& group = bad.at("param_groups").list().front().dict();
          group.at("params").list().pop_back();
        },
        "missing \"param_groups.");
    expect_refused(
        [&](StateDict& bad) {
          if (world.rank() == 1) {
            state(bad).at("b.bias").dict().set("exp_avg_sq", torch::zeros({9}));
          }
        },
        "has the shape [9], the parameter [3]");
    expect_refused([&](StateDict& bad) { bad = StateDict(); }, "is empty");
    // An option that this optimizer does not take: found by the optimizer.
    expect_refused(
        [&](StateDict& bad) {
          bad.at("param_groups").list().front().dict().set("lr", "fast");
        },
        "lr");
    auto stranger = make(GetParam());
    optim::Adam strange(parameters(*stranger), 0.01);
    EXPECT_THAT(
        error_of(
            [&] { set_optimizer_state_dict(*net, {strange}, good, kFull); }),
        HasSubstr("is not of this model"));
  });
}

TEST_P(StateOfTest, IfOneOfThemIsRefusedModelAndOptimizersStayAsTheyAre) {
  on_ranks(2, [](const Group& world) {
    auto net = make(GetParam());
    auto all = parameters(*net);
    optim::Adam first({all.front()}, 0.01);
    optim::Adam second(
        std::vector<at::Tensor>(all.begin() + 1, all.end()), 0.02);
    const OptimizerRefs both{first, second};
    auto state = get_state_dict(*net, both, kFull);
    state.model = state.model.clone();
    state.optimizer = state.optimizer.clone();
    const StateDict model = state.model.clone();
    const StateDict before[] = {
        optim::state_dict(first).clone(), optim::state_dict(second).clone()};
    for (const auto& [name, value] : state.model) {
      value.tensor().add_(1);
    }
    for (const auto& [name, entry] : state.optimizer.at("state").dict()) {
      entry.dict().at("exp_avg").tensor().add_(1);
    }
    const auto expect_refused = [&](const ModelAndOptimizerState& bad,
                                    const char* text) {
      EXPECT_THAT(
          error_of([&] { set_state_dict(*net, both, bad, kFull); }),
          HasSubstr(text));
      EXPECT_EQ(diff_state_dicts(get_model_state_dict(*net, kFull), model), "");
      EXPECT_EQ(diff_state_dicts(optim::state_dict(first), before[0]), "");
      EXPECT_EQ(diff_state_dicts(optim::state_dict(second), before[1]), "");
    };
    auto bad_model = state;
    bad_model.model.set("b.bias", torch::zeros({4}));
    expect_refused(bad_model, "[4], the model [3]");
    // Only the second optimizer, and only on rank 1, finds this one.
    auto bad_option = state;
    if (world.rank() == 1) {
      bad_option.optimizer.at("param_groups")
          .list()
          .back()
          .dict()
          .set("lr", "fast");
    }
    expect_refused(bad_option, "lr");
  });
}

TEST_P(StateOfTest, SeveralOptimizersShareOneDictionary) {
  on_ranks(2, [](const Group&) {
    auto net = make(GetParam());
    const auto build = [](Net& model) {
      auto all = parameters(model);
      std::vector<at::Tensor> rest(all.begin() + 1, all.end());
      return std::pair(
          optim::Adam({all.front()}, 0.01), optim::Adam(rest, 0.02));
    };
    auto [first, second] = build(*net);
    net->forward(torch::ones({4, 5})).sum().backward();
    first.step();
    second.step();
    const StateDict state =
        get_optimizer_state_dict(*net, {first, second}).clone();
    EXPECT_EQ(state.at("param_groups").list().size(), 2u);
    auto other = make(GetParam());
    auto [other_first, other_second] = build(*other);
    set_optimizer_state_dict(*other, {other_first, other_second}, state);
    EXPECT_EQ(
        diff_state_dicts(
            optim::state_dict(other_second), optim::state_dict(second)),
        "");
    EXPECT_EQ(
        diff_state_dicts(
            optim::state_dict(other_first), optim::state_dict(first)),
        "");
  });
}

std::string name_of(const ::testing::TestParamInfo<How>& test) {
  static constexpr const char* kNames[] = {
      "FsdpFlat", "FsdpOrig", "FullyShard", "FullyShardDim0"};
  return kNames[static_cast<int>(test.param)];
}

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    StateOfTest,
    ::testing::Values(How::Flat, How::Orig, How::ShardFlat, How::ShardDim0),
    name_of);

TEST_P(StateOfTest, AnOptimizersOwnLoadTakesNamesAndShardedTensors) {
  on_ranks(4, [](const Group&) { // some ranks have nothing of "scale"
    auto net = make(GetParam());
    auto optim = train(*net);
    const StateDict own = optim::state_dict(optim).clone();
    const StateDict saved = get_optimizer_state_dict(*net, {optim}).clone();
    optim::Adam fresh(parameters(*net), 0.5);
    const auto load = [&] { optim::load_state_dict(fresh, saved); };
    if (GetParam() == How::Flat) { // one tensor for several names
      EXPECT_THAT(error_of(load), HasSubstr("call set_optimizer_state_dict()"));
      return;
    }
    load();
    EXPECT_EQ(diff_state_dicts(optim::state_dict(fresh), own), "");
  });
}

TEST(StateTest, AnOptimizersOwnLoadRefusesWhatDoesNotFit) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::ShardDim0);
    auto optim = train(*net);
    const StateDict saved = get_optimizer_state_dict(*net, {optim}).clone();

    auto flat = make(How::ShardFlat);
    auto other = train(*flat);
    const StateDict before = optim::state_dict(other).clone();
    EXPECT_THAT(
        error_of([&] { optim::load_state_dict(other, saved); }),
        AllOf(HasSubstr("cut in another way"), HasSubstr("exp_avg")));
    EXPECT_EQ(diff_state_dicts(optim::state_dict(other), before), "");

    auto reversed = parameters(*net);
    std::reverse(reversed.begin(), reversed.end());
    optim::Adam backwards(reversed, 0.01);
    EXPECT_THAT(
        error_of([&] { optim::load_state_dict(backwards, saved); }),
        HasSubstr(
            "has the name \"scale\" where this optimizer has \"b.bias\""));
    EXPECT_TRUE(optim::state_dict(backwards).at("state").dict().empty());

    Net plain;
    optim::Adam of_plain(plain.parameters(), 0.01);
    EXPECT_THAT(
        error_of([&] { optim::load_state_dict(of_plain, saved); }),
        HasSubstr("does not step a shard of one parameter"));
  });
}

TEST(StateTest, ShardedStateLoadsIntoAPlainModelOnTheSameRanks) {
  for (const How how : {How::Flat, How::Orig, How::ShardFlat, How::ShardDim0}) {
    on_ranks(2, [how](const Group&) {
      auto net = make(how);
      auto optim = train(*net);
      const auto state = get_state_dict(*net, {optim});
      Net plain;
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
TEST(StateTest, WhatRank0SendsIsCheckedForAll) {
  on_ranks(2, [](const Group& world) {
    const auto from_rank0 =
        StateDictOptions().full_state_dict(true).broadcast_from_rank0(true);
    auto net = make(How::Orig);
    auto optim = train(*net);
    Net plain;
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

TEST(StateTest, OptionsThatDifferBetweenRanksAreRefused) {
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

TEST(StateTest, MissingOptimizerStateIsNamedUnlessToldOtherwise) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::Orig);
    auto optim = train(*net);
    StateDict osd = get_optimizer_state_dict(*net, {optim}, kFull).clone();
    osd.at("state").dict().erase("a.weight");
    osd.at("state").dict().erase("b.bias");
    const std::string error =
        error_of([&] { set_optimizer_state_dict(*net, {optim}, osd, kFull); });
    EXPECT_THAT(error, HasSubstr("missing \"state.a.weight\""));
    EXPECT_THAT(error, HasSubstr("missing \"state.b.bias\""));
    auto lenient = kFull;
    set_optimizer_state_dict(*net, {optim}, osd, lenient.strict(false));
    EXPECT_EQ(
        get_optimizer_state_dict(*net, {optim}, kFull)
            .at("state")
            .dict()
            .size(),
        3u);
  });
}

/// A rank without elements has no state; that must not make it initialize.
TEST(StateTest, StateOnSomeRanksOnlyIsLeftAlone) {
  on_ranks(2, [](const Group&) {
    struct Two : torch::nn::Module {
      at::Tensor one = register_parameter("one", torch::ones({1, 3}));
      at::Tensor two = register_parameter("two", torch::ones({4, 3}));
    };
    auto net = std::make_shared<Two>();
    fully_shard(*net, FullyShardOptions().layout(ShardLayout::Dim0));
    optim::Adam optim(parameters(*net), 0.1);
    net->one.sum().backward();
    optim.step();
    optim.zero_grad();
    const StateDict osd = get_optimizer_state_dict(*net, {optim}, kFull);
    EXPECT_EQ(osd.at("state").dict().keys(), (std::vector<StateKey>{"one"}));
  });
}

TEST(StateTest, ANamedOptimizerLoadsByItsNames) {
  on_ranks(2, [](const Group&) {
    auto net = make(How::Orig);
    const auto named = [](Net& model) {
      return optim::NamedOptimizer(
          named_parameters(model),
          std::make_unique<optim::Adam>(parameters(model), 0.01));
    };
    auto optim = named(*net);
    net->forward(torch::ones({4, 5})).sum().backward();
    optim.step();
    const auto state = get_state_dict(*net, {optim});
    auto other = make(How::Orig);
    auto other_optim = named(*other);
    set_state_dict(*other, {other_optim}, state);
    EXPECT_EQ(
        diff_state_dicts(
            optim::state_dict(other_optim), optim::state_dict(optim)),
        "");
  });
}

/// Copies of the model, and a rank 0 that is not in the first of them.
TEST(StateTest, ScatteringReachesEveryCopy) {
  on_ranks(4, [](const Group& world) {
    const Mesh mesh(world, {2, 2});
    auto net = std::make_shared<Net>();
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

TEST(StateTest, ARank0OutsideOfAUnitsGroupIsRefused) {
  on_ranks(4, [](const Group& world) {
    auto net = std::make_shared<Net>();
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

TEST(StateTest, NamesWithoutPrefixesMustStayApart) {
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

TEST(StateTest, SubmodulesWithAndWithoutTheirPrefixes) {
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

TEST(StateTest, FrozenParametersCanBeLeftOut) {
  on_ranks(2, [](const Group&) {
    auto net = std::make_shared<Net>();
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

TEST(StateTest, ADictionaryFlattenedAsPythonDoesComesBack) {
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

TEST(StateTest, OptionsThatExcludeEachOtherAreRefused) {
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

TEST(StateTest, InsideSummonItIsRefused) {
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

TEST(StateTest, APlainModuleHasStateToo) {
  Net net;
  const StateDict dict = state_dict(net);
  EXPECT_EQ(
      dict.keys(),
      (std::vector<StateKey>{
          "scale", "seen", "a.weight", "a.bias", "b.weight", "b.bias"}));
  Net other;
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
TEST(StateTest, FullStateNeedsTheResultAndNothingBesideIt) {
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
