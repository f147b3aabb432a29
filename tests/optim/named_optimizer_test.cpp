#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/named_optimizer.h>

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

using Params = std::vector<at::Tensor>;

NamedOptimizer::NamedTensors named(const Params& params) {
  const std::vector<std::string> names{"fc.weight", "fc.bias", "out", "none"};
  NamedOptimizer::NamedTensors all;
  for (size_t i = 0; i < params.size(); ++i) {
    all.emplace_back(names.at(i), params[i]);
  }
  return all;
}

Params clones_of(const Params& params) {
  Params copies;
  for (const auto& param : params) {
    copies.push_back(param.detach().clone().requires_grad_());
  }
  return copies;
}

class NamedOptimizerTest : public ::testing::TestWithParam<Maker> {};

INSTANTIATE_TEST_SUITE_P(
    All,
    NamedOptimizerTest,
    ::testing::ValuesIn(makers()),
    [](const auto& test) { return test.param.name; });

TEST_P(NamedOptimizerTest, StepsAsTheOneInsideAndNamesItsState) {
  auto params = make_params();
  auto plain_params = clones_of(params);
  NamedOptimizer optimizer(named(params), GetParam().make(params));
  const auto plain = GetParam().make(plain_params);
  torch::optim::StepLR scheduler(optimizer, 1, 0.5);
  torch::optim::StepLR plain_scheduler(*plain, 1, 0.5);
  for (int step = 0; step < 4; ++step) {
    make_gradients(params, step);
    make_gradients(plain_params, step);
    optimizer.step();
    plain->step();
    scheduler.step();
    plain_scheduler.step();
  }
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(at::equal(params[i], plain_params[i])) << i;
  }
  const auto dict = state_dict(optimizer);
  const auto numbered = state_dict(*plain);
  EXPECT_THAT(
      dict.at("state").dict().keys(),
      ElementsAre(StateKey("fc.weight"), StateKey("fc.bias"), StateKey("out")));
  EXPECT_EQ(
      diff_state_dicts(
          dict.at("state").dict().at("fc.bias").dict(),
          numbered.at("state").dict().at(1).dict()),
      "");
  EXPECT_EQ(
      dict.at_path("param_groups.0.params"),
      StateValue(StateList{"fc.weight", "fc.bias", "out", "none"}));
  EXPECT_EQ(
      dict.at_path("param_groups.0.lr"), numbered.at_path("param_groups.0.lr"));
}

TEST_P(NamedOptimizerTest, LoadsByNameWhateverTheOrder) {
  auto params = make_params();
  NamedOptimizer first(named(params), GetParam().make(params));
  for (int step = 0; step < 3; ++step) {
    make_gradients(params, step);
    first.step();
  }
  auto copies = clones_of(params);
  const auto names = named(copies);
  NamedOptimizer second(
      names, GetParam().make({copies[3], copies[2], copies[1], copies[0]}));
  load_state_dict(
      second, state_dict_from_bytes(state_dict_to_bytes(first.state_dict())));
  for (int step = 3; step < 6; ++step) {
    make_gradients(params, step);
    make_gradients(copies, step);
    first.step();
    second.step();
  }
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(at::equal(params[i], copies[i])) << i;
  }
}

TEST_P(NamedOptimizerTest, InitializesState) {
  auto params = make_params();
  NamedOptimizer optimizer(named(params), GetParam().make(params));
  initialize_state(optimizer);
  EXPECT_EQ(optimizer.state_dict().at("state").dict().size(), 3u);
}

TEST(NamedLibTorchTest, AClosureThatClearsGradientsRunsInsideLBFGS) {
  auto params = make_params();
  params.resize(2);
  auto plain_params = clones_of(params);
  const auto options = torch::optim::LBFGSOptions(0.1).max_iter(5);
  NamedOptimizer optimizer(
      named(params), std::make_unique<torch::optim::LBFGS>(params, options));
  torch::optim::LBFGS plain(plain_params, options);
  const auto closure = [](auto& which, const Params& of) {
    return [&which, of] {
      which.zero_grad(); // gradients add up without
      auto loss = of[0].pow(4).sum() + of[1].cosh().sum();
      loss.backward();
      return loss;
    };
  };
  const auto loss = optimizer.step(closure(optimizer, params));
  const auto plain_loss = plain.step(closure(plain, plain_params));
  EXPECT_TRUE(at::equal(loss, plain_loss));
  EXPECT_TRUE(at::equal(params[0], plain_params[0]));
  EXPECT_TRUE(optimizer.state_dict()
                  .at_path("state.fc.weight.prev_flat_grad")
                  .is_tensor());
}

TEST(NamedGroupsTest, GroupsAreThoseWithTheSameParameters) {
  auto params = make_params();
  const auto make = [&](size_t first, size_t second, double lr) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(
        Params{params[first]}, std::make_unique<SGDOptions>(lr));
    groups.emplace_back(
        Params{params[second]}, std::make_unique<SGDOptions>(2 * lr));
    return std::make_unique<SGD>(groups);
  };
  NamedOptimizer one(named(params), make(0, 1, 0.1));
  NamedOptimizer other(named(params), make(1, 0, 0.5));
  other.load_state_dict(one.state_dict());
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.2);
  EXPECT_EQ(other.param_groups()[1].options().get_lr(), 0.1);
}

TEST(NamedGroupsTest, AGroupThatComesLaterKeepsItsOptions) {
  auto params = make_params();
  NamedOptimizer optimizer(
      named(params), std::make_unique<Adam>(Params{params[0]}, 0.5));
  OptimizerParamGroup later(
      {params[1]}, std::make_unique<AdamOptions>(AdamOptions().eps(0.25)));
  optimizer.add_param_group(later);
  const auto dict = optimizer.state_dict();
  EXPECT_EQ(dict.at_path("param_groups.1.eps").to_double(), 0.25);
  EXPECT_EQ(dict.at_path("param_groups.1.lr").to_double(), 0.5);
  make_gradients(params, 0);
  optimizer.step();
  EXPECT_TRUE(optimizer.state_dict().at("state").dict().contains("fc.bias"));
  OptimizerParamGroup nameless({torch::ones(1, torch::requires_grad())});
  EXPECT_THAT(
      error_of([&] { optimizer.add_param_group(nameless); }),
      HasSubstr("has no name"));
  EXPECT_EQ(optimizer.param_groups().size(), 2u);
}

TEST(NamedRejectsTest, NamesThatDoNotFit) {
  auto params = make_params();
  auto twice = named(params);
  twice[1].first = twice[0].first;
  EXPECT_THAT(
      error_of([&] { NamedOptimizer(twice, std::make_unique<SGD>(params)); }),
      HasSubstr("the name \"fc.weight\" is given twice"));
  auto missing = named(params);
  missing.erase(missing.begin() + 2);
  EXPECT_THAT(
      error_of([&] { NamedOptimizer(missing, std::make_unique<SGD>(params)); }),
      HasSubstr("parameter 2 of param group 0 has no name"));
}

TEST(NamedRejectsTest, DictionariesThatDoNotFit) {
  auto params = make_params();
  NamedOptimizer optimizer(named(params), std::make_unique<Adam>(params));
  make_gradients(params, 0);
  optimizer.step();
  const auto good = optimizer.state_dict().clone();
  const auto error = [&](const StateDict& dict) {
    auto text = error_of([&] { load_state_dict(optimizer, dict); });
    EXPECT_EQ(diff_state_dicts(optimizer.state_dict(), good), "");
    return text;
  };
  Adam plain(params);
  EXPECT_THAT(
      error(plain.state_dict()),
      HasSubstr("has the number 0, this optimizer names its parameters"));
  auto dict = good.clone();
  dict.at("param_groups").list()[0].dict().at("params").list()[1] = "fc.scale";
  EXPECT_THAT(error(dict), HasSubstr("has parameter \"fc.bias\""));
  dict = good.clone();
  dict.at("param_groups").list()[0].dict().at("params").list().push_back("x");
  EXPECT_THAT(error(dict), HasSubstr("exactly the 4 parameters"));
  dict = good.clone();
  dict.at("state").dict().at("out").dict().set("exp_avg", torch::zeros({9}));
  EXPECT_THAT(
      error(dict),
      AllOf(
          HasSubstr("parameter \"out\""), HasSubstr("[9], the parameter [2]")));
}

TEST(NamedShardsTest, ShardsHaveTheNamesOfTheModule) {
  tessera::testing::on_ranks(2, [](const Group& world) {
    torch::manual_seed(0);
    torch::nn::Linear linear(3, 2);
    fully_shard(*linear);
    NamedOptimizer optimizer(
        named_parameters(*linear),
        std::make_unique<Adam>(parameters(*linear), 0.1));
    linear->forward(torch::ones({1, 3})).sum().backward();
    optimizer.step();
    const auto dict = optimizer.state_dict();
    const auto shards = named_parameters(*linear);
    for (const auto& [name, shard] : shards) {
      const StateValue* state = dict.at("state").dict().find(name);
      ASSERT_EQ(state != nullptr, shard.numel() > 0) << world.rank() << name;
      if (state != nullptr) {
        EXPECT_EQ(state->dict().at("exp_avg").tensor().sizes(), shard.sizes());
      }
    }
    optimizer.load_state_dict(dict.clone());
    EXPECT_EQ(diff_state_dicts(optimizer.state_dict(), dict), "");
  });
}

} // namespace
} // namespace tessera::optim
