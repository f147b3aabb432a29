// State dicts of models and optimizers: what they hold, what they refuse.
#include <tessera/engine/transient_buffers.h>
#include <tessera/error.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/optim/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>
#include <tessera/transfer/model_state.h>
#include <tessera/transfer/optim_state.h>
#include <tessera/transfer/state_dict_type.h>

#include "fsdp/state_net.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

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

/// A module with a table that it computes.
struct WithTable : torch::nn::Module, HasTransientBuffers {
  WithTable() {
    register_parameter("weight", torch::ones({4}));
    register_buffer("seen", torch::zeros({2}));
    register_buffer("table", torch::ones({3}));
  }
  bool is_persistent(const std::string& buffer) const override {
    return buffer != "table";
  }
};

TEST(StateTest, ABufferThatIsNotPersistentIsNotPartOfIt) {
  on_ranks(2, [](const Group&) {
    WithTable module;
    fully_shard(module);
    for (const auto type :
         {StateDictType::FullStateDict,
          StateDictType::LocalStateDict,
          StateDictType::ShardedStateDict}) {
      const StateDictTypeGuard guard(module, type);
      const StateDict state = state_dict(module);
      EXPECT_EQ(state.keys(), (std::vector<StateKey>{"weight", "seen"}));
      const auto keys = load_state_dict(module, state.clone());
      EXPECT_TRUE(keys.missing.empty() && keys.unexpected.empty());
    }
    EXPECT_FALSE(get_model_state_dict(module, kFull).contains("table"));
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
    const auto build = [](StateNet& model) {
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

} // namespace
} // namespace tessera
