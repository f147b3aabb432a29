// Dictionaries of Tessera's optimizers.
#include <tessera/optim/muon.h>
#include <tessera/optim/state_dict.h>

#include "optim/makers.h"
#include "optim/params.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::optim {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

std::vector<std::string> texts(const std::vector<StateKey>& keys) {
  std::vector<std::string> all;
  for (const StateKey& key : keys) {
    all.push_back(key.text());
  }
  return all;
}

const StateDict& group_of(const StateDict& dict, size_t index = 0) {
  return dict.at("param_groups").list().at(index).dict();
}

const StateDict& state_of(const StateDict& dict, int64_t id) {
  return dict.at("state").dict().at(id).dict();
}

/// The dictionary of an Adam after one step, to be spoiled.
struct Saved {
  std::vector<at::Tensor> params = make_params();
  Adam optimizer{params, 0.1};
  StateDict dict;

  Saved() {
    make_gradients(params, 0);
    optimizer.step();
    dict = optimizer.state_dict().clone();
  }

  StateDict& group() {
    return dict.at("param_groups").list().at(0).dict();
  }
  StateDict& state(int64_t id) {
    return dict.at("state").dict().at(id).dict();
  }
  /// The error of loading; nothing must have been loaded.
  std::string error() {
    const StateDict before = optimizer.state_dict().clone();
    auto text = error_of([&] { optimizer.load_state_dict(dict); });
    EXPECT_EQ(diff_state_dicts(optimizer.state_dict(), before), "");
    return text;
  }
};

TEST(OptimStateDictTest, NumbersParametersThroughAllGroups) {
  auto params = make_params();
  Adam optimizer(
      {OptimizerParamGroup({params[0], params[1]}),
       OptimizerParamGroup({params[2], params[3]})});
  make_gradients(params, 0);
  params[1].mutable_grad() = at::Tensor();
  optimizer.step();
  const auto dict = optimizer.state_dict();
  EXPECT_THAT(texts(dict.keys()), ElementsAre("state", "param_groups"));
  // 1 has no gradient, 3 no elements.
  EXPECT_THAT(
      dict.at("state").dict().keys(), ElementsAre(StateKey(0), StateKey(2)));
  EXPECT_THAT(
      texts(state_of(dict, 0).keys()),
      ElementsAre("step", "exp_avg", "exp_avg_sq"));
  EXPECT_EQ(group_of(dict, 1).at("params"), StateValue(StateList{2, 3}));
  const auto step = state_of(dict, 0).at("step").tensor();
  EXPECT_EQ(step.dim(), 0);
  EXPECT_EQ(step.scalar_type(), at::kFloat);
  EXPECT_EQ(step.item<float>(), 1);
}

TEST(OptimStateDictTest, SharesMemoryUntilCloned) {
  Saved saved;
  const auto shared = saved.optimizer.state_dict();
  const auto snapshot = shared.clone();
  saved.optimizer.step();
  EXPECT_EQ(state_of(shared, 0).at("step").tensor().item<float>(), 2);
  EXPECT_EQ(state_of(snapshot, 0).at("step").tensor().item<float>(), 1);
}

TEST(OptimStateDictTest, LoadingCopies) {
  Saved saved;
  saved.optimizer.load_state_dict(saved.dict);
  saved.optimizer.step();
  EXPECT_EQ(saved.state(0).at("step").tensor().item<float>(), 1);
}

TEST(OptimStateDictTest, NumbersOfADictionaryStandForPlaces) {
  Saved saved;
  StateDict moved{{"state", StateDict()}, {"param_groups", StateList()}};
  StateDict group = saved.group();
  group.set("params", StateList{40, 10, 20, 30});
  moved.at("param_groups").list().push_back(group);
  moved.at("state").dict().set(40, saved.state(0));
  auto params = make_params();
  Adam other(params);
  other.load_state_dict(moved);
  EXPECT_EQ(
      diff_state_dicts(
          state_of(other.state_dict(), 0), state_of(saved.dict, 0)),
      "");
  EXPECT_EQ(other.state_dict().at("state").dict().size(), 1u);
}

TEST(OptimStateDictTest, RejectsOtherGroups) {
  Saved saved;
  saved.group().at("params").list().pop_back();
  EXPECT_THAT(
      saved.error(),
      HasSubstr(
          "param group 0 has 3 parameters in the dictionary, 4 in this optimizer"));
  saved.dict.at("param_groups").list().clear();
  EXPECT_THAT(
      saved.error(),
      HasSubstr("the dictionary has 0 param groups, this optimizer 1"));
}

TEST(OptimStateDictTest, RejectsAnotherShape) {
  Saved saved;
  saved.state(0).set("exp_avg_sq", torch::zeros({4, 5}));
  EXPECT_THAT(
      saved.error(),
      AllOf(
          HasSubstr("parameter \"0\""),
          HasSubstr("\"exp_avg_sq\" has shape [4, 5]"),
          HasSubstr("the parameter [4, 3]")));
}

TEST(OptimStateDictTest, NamesStandForPlacesAsInPython) {
  Saved saved;
  const StateDict numbered = saved.dict.clone();
  const char* const names[] = {"d", "c", "b", "a"}; // in no order
  saved.group().set("params", StateList{"d", "c", "b", "a"});
  EXPECT_THAT(saved.error(), HasSubstr("there is state for parameter \"0\""));
  StateDict named;
  for (const auto& [id, state] : numbered.at("state").dict()) {
    named.set(names[id.id()], state);
  }
  saved.dict.set("state", std::move(named));
  Adam fresh(make_params(), 0.5);
  fresh.load_state_dict(saved.dict);
  EXPECT_EQ(diff_state_dicts(fresh.state_dict(), numbered), "");
}

TEST(OptimStateDictTest, RejectsNumbersThatAreNotIntegers) {
  Saved saved;
  saved.group().set("params", StateList{0, 1, 2.5, 3});
  EXPECT_THAT(
      saved.error(), HasSubstr("\"params\" has a value of kind double"));
}

TEST(OptimStateDictTest, RejectsAParameterThatIsThereTwice) {
  Saved saved;
  saved.group().set("params", StateList{0, 1, 1, 3});
  EXPECT_THAT(
      saved.error(), HasSubstr("parameter \"1\", which appears twice in the"));
}

TEST(OptimStateDictTest, RejectsStateThatNoGroupHas) {
  Saved saved;
  saved.dict.at("state").dict().set(17, saved.state(0));
  EXPECT_THAT(
      saved.error(), HasSubstr("state for parameter \"17\", which no param"));
  Saved named;
  named.dict.at("state").dict().set("fc.weight", named.state(0));
  EXPECT_THAT(named.error(), HasSubstr("state for parameter \"fc.weight\""));
}

TEST(OptimStateDictTest, RejectsWhatIsNoDictionaryOfAnOptimizer) {
  Saved saved;
  saved.dict.set("epoch", 3);
  EXPECT_THAT(saved.error(), HasSubstr("has \"epoch\" beside"));
  saved.dict.erase("epoch");
  saved.dict.erase("param_groups");
  EXPECT_THAT(saved.error(), HasSubstr("has no \"param_groups\""));
  saved.dict.set("param_groups", 1);
  EXPECT_THAT(saved.error(), HasSubstr("they are dict and int"));
  saved.dict.set("param_groups", StateList{1});
  EXPECT_THAT(saved.error(), HasSubstr("param group 0 is of kind int"));
  saved.dict.set("param_groups", StateList{StateDict{{"lr", 0.1}}});
  EXPECT_THAT(saved.error(), HasSubstr("has no list \"params\""));
  saved.dict.erase("state");
  EXPECT_THAT(saved.error(), HasSubstr("has no \"state\""));
}

TEST(OptimStateDictTest, RejectsAGroupWithoutALearningRate) {
  Saved saved;
  saved.group().erase("lr");
  EXPECT_THAT(saved.error(), HasSubstr("param group 0 has no \"lr\""));
}

TEST(OptimStateDictTest, RejectsOptionsOfAnotherKindOrRange) {
  Saved saved;
  const StateDict good = saved.dict.clone();
  const auto with = [&](const char* key, StateValue value) {
    saved.dict = good.clone();
    saved.group().set(key, std::move(value));
    return saved.error();
  };
  EXPECT_THAT(with("eps", "small"), HasSubstr("\"eps\" is"));
  EXPECT_THAT(with("amsgrad", 1), HasSubstr("\"amsgrad\" is"));
  EXPECT_THAT(with("betas", StateList{0.9}), HasSubstr("two numbers"));
  EXPECT_THAT(with("lr", -1.0), HasSubstr("lr is -1, must be 0 or more"));
  EXPECT_THAT(
      with("differentiable", true), HasSubstr("\"differentiable\" is true"));
}

TEST(OptimStateDictTest, RejectsStateThatIsIncompleteOrOfAnotherKind) {
  Saved saved;
  const StateDict good = saved.dict.clone();
  saved.state(2).erase("exp_avg");
  EXPECT_THAT(
      saved.error(),
      AllOf(HasSubstr("parameter \"2\""), HasSubstr("no \"exp_avg\"")));
  saved.dict = good.clone();
  saved.state(2).set("exp_avg", 1.5);
  EXPECT_THAT(saved.error(), HasSubstr("\"exp_avg\" is of kind double"));
  saved.dict = good.clone();
  saved.state(2).set("step", torch::zeros(2));
  EXPECT_THAT(saved.error(), HasSubstr("\"step\" must be a number"));
  saved.dict = good.clone();
  saved.dict.at("state").dict().set(2, 5);
  EXPECT_THAT(saved.error(), HasSubstr("its state is of kind int"));
}

TEST(OptimStateDictTest, RejectsShardedTensors) {
  tessera::testing::on_ranks(1, [](const Group& world) {
    Saved saved;
    const auto part = torch::zeros({2}, torch::kDouble);
    saved.state(0).set(
        "exp_avg",
        ShardedTensor({2}, at::kDouble, {{{{0}, {2}}, part}}, world));
    EXPECT_THAT(
        saved.error(),
        AllOf(
            HasSubstr("state \"exp_avg\" is a sharded tensor"),
            HasSubstr("Call set_optimizer_state_dict()")));
  });
}

TEST(OptimStateDictTest, AdamWRejectsCoupledWeightDecay) {
  Saved adam;
  AdamW adamw(adam.params);
  EXPECT_THAT(
      error_of([&] { adamw.load_state_dict(adam.dict); }),
      AllOf(
          HasSubstr("\"decoupled_weight_decay\" is false"),
          HasSubstr("Load it into an Adam")));
}

TEST(OptimStateDictTest, AnyKeySurvivesInAGroup) {
  auto params = make_params();
  SGD optimizer(
      params, SGDOptions(0.1).extra("tag", "body").extra("schedule", 3));
  make_gradients(params, 0);
  optimizer.step();
  auto dict = optimizer.state_dict().clone();
  EXPECT_EQ(group_of(dict).at("tag").string(), "body");
  dict.at("param_groups").list()[0].dict().set("initial_lr", 0.5);
  dict.at("param_groups").list()[0].dict().set("tag", nullptr);
  SGD other(make_params());
  other.load_state_dict(dict);
  other.step();
  EXPECT_EQ(diff_state_dicts(other.state_dict(), dict), "");
  EXPECT_TRUE(group_of(other.state_dict()).at("tag").is_none());
}

TEST(OptimStateDictTest, AnyValueSurvivesInTheState) {
  for (const double momentum : {0.0, 0.9}) {
    auto params = make_params();
    SGD optimizer(params, SGDOptions(0.1).momentum(momentum));
    make_gradients(params, 0);
    optimizer.step();
    optimizer.state_of(params[0]).set("value1", 2.74);
    optimizer.state_of(params[0]).set("value2", nullptr);
    optimizer.state_of(params[2]).set(
        "value3", StateList{torch::tensor({1, 2}), "x"});
    const auto dict = optimizer.state_dict().clone();
    SGD other(params);
    other.load_state_dict(dict);
    EXPECT_EQ(diff_state_dicts(other.state_dict(), dict), "");
    other.step();
    const auto after = other.state_dict();
    EXPECT_EQ(state_of(after, 0).at("value1").to_double(), 2.74);
    EXPECT_TRUE(state_of(after, 0).at("value2").is_none());
    EXPECT_EQ(state_of(after, 2).at("value3").list().size(), 2u);
  }
}

TEST(OptimStateDictTest, TensorsAreCastToTheParameterButNotStep) {
  auto param =
      torch::ones({3}, torch::dtype(at::kBFloat16).requires_grad(true));
  Adam optimizer({param});
  StateDict state{
      {"step", torch::tensor(1001.0, at::kDouble)},
      {"exp_avg", torch::full({3}, 0.5, at::kDouble)},
      {"exp_avg_sq", torch::full({3}, 0.25, at::kFloat)},
      {"mask", torch::tensor({true, false})},
      {"noise", torch::tensor({0.5}, at::kDouble)}};
  StateDict group{{"lr", torch::tensor(0.5)}, {"params", StateList{0}}};
  optimizer.load_state_dict(
      {{"state", StateDict{{0, state}}}, {"param_groups", StateList{group}}});
  const StateDict& loaded = *optimizer.find_state(param);
  EXPECT_EQ(loaded.at("step").tensor().scalar_type(), at::kFloat);
  EXPECT_EQ(loaded.at("step").tensor().item<float>(), 1001);
  EXPECT_EQ(loaded.at("exp_avg").tensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(loaded.at("exp_avg_sq").tensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(loaded.at("mask").tensor().scalar_type(), at::kBool);
  EXPECT_EQ(loaded.at("noise").tensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
}

TEST(OptimStateDictTest, AStepMayBeAPlainNumber) {
  Saved saved;
  saved.state(0).set("step", 7);
  saved.optimizer.load_state_dict(saved.dict);
  const auto& step =
      saved.optimizer.find_state(saved.params[0])->at("step").tensor();
  EXPECT_EQ(step.item<float>(), 7);
}

TEST(OptimStateDictTest, KeysThatAreMissingKeepTheirValues) {
  auto params = make_params();
  Adam optimizer(params, AdamOptions(0.1).eps(0.5));
  StateDict group{{"lr", 0.25}, {"params", StateList{0, 1, 2, 3}}};
  optimizer.load_state_dict(
      {{"state", StateDict()}, {"param_groups", StateList{group}}});
  const auto dict = optimizer.state_dict();
  EXPECT_EQ(group_of(dict).at("lr").to_double(), 0.25);
  EXPECT_EQ(group_of(dict).at("eps").to_double(), 0.5);
}

TEST(OptimStateDictTest, StateThatIsNotInTheDictionaryIsForgotten) {
  Saved saved;
  saved.dict.at("state").dict().erase(0);
  saved.optimizer.load_state_dict(saved.dict);
  EXPECT_EQ(saved.optimizer.find_state(saved.params[0]), nullptr);
  EXPECT_NE(saved.optimizer.find_state(saved.params[1]), nullptr);
}

TEST(OptimStateDictTest, PythonsChoiceOfImplementationIsCarriedAlong) {
  Saved saved;
  saved.group().set("fused", true);
  saved.group().set("foreach", false);
  saved.optimizer.load_state_dict(saved.dict);
  EXPECT_EQ(diff_state_dicts(saved.optimizer.state_dict(), saved.dict), "");
}

class RoundTripTest : public ::testing::TestWithParam<Maker> {};

INSTANTIATE_TEST_SUITE_P(
    All,
    RoundTripTest,
    ::testing::ValuesIn(makers()),
    [](const auto& test) { return test.param.name; });

TEST_P(RoundTripTest, TrainingGoesOnBitByBit) {
  auto params = make_params();
  const auto first = GetParam().make(params);
  for (int step = 0; step < 3; ++step) {
    make_gradients(params, step);
    first->step();
  }
  std::vector<at::Tensor> copies;
  for (const auto& param : params) {
    copies.push_back(param.detach().clone().requires_grad_());
  }
  // Through bytes, as another process would get it.
  const auto dict =
      state_dict_from_bytes(state_dict_to_bytes(first->state_dict()));
  const auto second = GetParam().make(copies);
  second->load_state_dict(dict);
  EXPECT_EQ(diff_state_dicts(second->state_dict(), first->state_dict()), "");
  for (int step = 3; step < 6; ++step) {
    make_gradients(params, step);
    make_gradients(copies, step);
    first->step();
    second->step();
  }
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(at::equal(params[i], copies[i])) << i;
  }
  EXPECT_EQ(diff_state_dicts(second->state_dict(), first->state_dict()), "");
}

TEST(OptimizerTest, LibTorchsArchivesAreRefused) {
  Adam optimizer({torch::ones({2})}, 0.1);
  std::ostringstream out;
  EXPECT_THROW(torch::save(optimizer, out), c10::NotImplementedError);
}

TEST(OptimizerTest, AParameterTwiceIsRefused) {
  const auto param = torch::ones({2});
  EXPECT_THROW(Adam({param, param}, 0.1), c10::ValueError);
}

TEST(OptimizerTest, ExtraKeysCannotShadowOptions) {
  EXPECT_THROW(
      SGD({torch::ones({2})}, SGDOptions(0.1).extra("momentum", 3.0)),
      c10::ValueError);
}

TEST(StateDictTest, AnotherKindOfOptimizersStateIsRefused) {
  const auto params = make_params();
  for (const at::Tensor& param : params) {
    param.mutable_grad() = torch::ones_like(param);
  }
  const auto state_after_a_step = [&](auto optimizer) {
    optimizer.step();
    return optimizer.state_dict();
  };
  const auto expect_refused = [&](Optimizer& optimizer, const StateDict& dict) {
    const StateDict before = optimizer.state_dict();
    EXPECT_THAT(
        error_of([&] { optimizer.load_state_dict(dict); }),
        HasSubstr("saved by another kind of optimizer"));
    EXPECT_EQ(diff_state_dicts(optimizer.state_dict(), before), "");
  };
  const StateDict adam = state_after_a_step(AdamW(params, 1e-3));
  const StateDict momentum =
      state_after_a_step(SGD(params, SGDOptions(0.1).momentum(0.9)));
  SGD sgd(params, SGDOptions(0.1).momentum(0.9));
  AdamW adamw(params, 1e-3);
  expect_refused(sgd, adam);
  expect_refused(adamw, momentum);
  // SGD's momentum has the name of Muon's.
  std::vector<at::Tensor> matrices{torch::ones({3, 2})};
  matrices.front().requires_grad_().mutable_grad() = torch::ones({3, 2});
  Muon muon(matrices, 1e-2);
  SGD of_matrices(matrices, SGDOptions(0.1).momentum(0.9));
  expect_refused(
      muon, state_after_a_step(SGD(matrices, SGDOptions(0.1).momentum(0.9))));
  expect_refused(of_matrices, state_after_a_step(Muon(matrices, 1e-2)));
  // State that belongs to no known class is kept, as in Python.
  StateDict own = adam;
  own.at("state").dict().at(0).dict().set("note", 3);
  EXPECT_NO_THROW(adamw.load_state_dict(own));
}

} // namespace
} // namespace tessera::optim
