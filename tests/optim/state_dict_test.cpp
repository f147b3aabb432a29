// Dictionaries of Tessera's optimizers.
#include <tessera/optim/adam.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/optim/state_dict.h>

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
  /// What loading says; nothing of it must have been loaded.
  std::string error() {
    const StateDict before = optimizer.state_dict().clone();
    auto text = error_of([&] { optimizer.load_state_dict(dict); });
    EXPECT_EQ(diff(optimizer.state_dict(), before), "");
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
  EXPECT_EQ(diff(state_of(other.state_dict(), 0), state_of(saved.dict, 0)), "");
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

} // namespace
} // namespace tessera::optim
