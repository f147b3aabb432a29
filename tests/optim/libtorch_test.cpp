// Dictionaries of LibTorch's own optimizers.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/state_dict.h>

#include "optim/makers.h"
#include "optim/params.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::optim {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Params = std::vector<at::Tensor>;
using TheirMaker =
    std::function<std::unique_ptr<torch::optim::Optimizer>(Params)>;

/// LibTorch's class, and ours with the same options.
struct Pair {
  std::string name;
  TheirMaker theirs;
  Maker ours;
};

std::ostream& operator<<(std::ostream& out, const Pair& pair) {
  return out << pair.name;
}

template <class O, class Options>
TheirMaker their(const Options& options) {
  return [options](Params params) {
    return std::make_unique<O>(std::move(params), options);
  };
}

std::vector<Pair> pairs() {
  namespace lib = torch::optim;
  return {
      {"SGD",
       their<lib::SGD>(
           lib::SGDOptions(0.1).momentum(0.5).dampening(0.1).weight_decay(0.1)),
       maker<SGD>(
           "SGD",
           SGDOptions(0.1).momentum(0.5).dampening(0.1).weight_decay(0.1))},
      {"Adam",
       their<lib::Adam>(lib::AdamOptions(0.1).weight_decay(0.1)),
       maker<Adam>("Adam", AdamOptions(0.1).weight_decay(0.1))},
      {"AdamW",
       their<lib::AdamW>(lib::AdamWOptions(0.1).amsgrad(true)),
       maker<AdamW>("AdamW", AdamWOptions(0.1).amsgrad(true))},
      {"Adagrad",
       their<lib::Adagrad>(lib::AdagradOptions(0.1).lr_decay(0.1)),
       maker<Adagrad>("Adagrad", AdagradOptions(0.1).lr_decay(0.1))},
      {"RMSprop",
       their<lib::RMSprop>(
           lib::RMSpropOptions(0.1).momentum(0.5).centered(true)),
       maker<RMSprop>(
           "RMSprop", RMSpropOptions(0.1).momentum(0.5).centered(true))}};
}

Params doubles() {
  auto params = make_params();
  params.resize(2);
  return params;
}

Params copies_of(const Params& params) {
  Params copies;
  for (const auto& param : params) {
    copies.push_back(param.detach().clone().requires_grad_());
  }
  return copies;
}

void train(torch::optim::Optimizer& optimizer, Params& params, int first) {
  for (int step = first; step < first + 3; ++step) {
    make_gradients(params, step);
    optimizer.step();
  }
}

class LibTorchTest : public ::testing::TestWithParam<Pair> {};

INSTANTIATE_TEST_SUITE_P(
    All,
    LibTorchTest,
    ::testing::ValuesIn(pairs()),
    [](const auto& test) { return test.param.name; });

TEST_P(LibTorchTest, HasTheDictionaryOfOurs) {
  auto params = doubles();
  auto others = copies_of(params);
  const auto theirs = GetParam().theirs(params);
  const auto ours = GetParam().ours.make(others);
  train(*theirs, params, 0);
  train(*ours, others, 0);
  const DiffTolerance close{.rtol = 1e-12, .atol = 1e-12};
  const auto dict = state_dict(*theirs);
  EXPECT_EQ(diff_state_dicts(dict, state_dict(*ours), close), "");
  if (const StateValue* step = dict.find_path("state.0.step")) {
    EXPECT_EQ(step->tensor().scalar_type(), at::kFloat);
    EXPECT_EQ(step->tensor().dim(), 0);
  }
}

TEST_P(LibTorchTest, TrainingGoesOnBitByBit) {
  auto params = doubles();
  const auto first = GetParam().theirs(params);
  train(*first, params, 0);
  auto copies = copies_of(params);
  const auto second = GetParam().theirs(copies);
  load_state_dict(
      *second, state_dict_from_bytes(state_dict_to_bytes(state_dict(*first))));
  EXPECT_EQ(diff_state_dicts(state_dict(*second), state_dict(*first)), "");
  train(*first, params, 3);
  train(*second, copies, 3);
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(at::equal(params[i], copies[i])) << i;
  }
}

TEST_P(LibTorchTest, LoadsWhatOursSavedAndBack) {
  auto params = doubles();
  const auto ours = GetParam().ours.make(params);
  train(*ours, params, 0);
  auto copies = copies_of(params);
  const auto theirs = GetParam().theirs(copies);
  load_state_dict(*theirs, state_dict(*ours));
  EXPECT_EQ(diff_state_dicts(state_dict(*theirs), state_dict(*ours)), "");
  train(*ours, params, 3);
  train(*theirs, copies, 3);
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(torch::allclose(params[i], copies[i], 1e-12, 1e-12)) << i;
  }
}

TEST_P(LibTorchTest, InitialStateIsThatOfAStepWithZeroGradients) {
  auto params = doubles();
  params[1].set_requires_grad(false);
  const auto before = params[0].detach().clone();
  const auto theirs = GetParam().theirs(params);
  const bool has_state = !theirs->state().empty(); // Adagrad from the start
  initialize_state(*theirs);
  EXPECT_TRUE(at::equal(params[0], before));
  EXPECT_FALSE(params[0].grad().defined());
  const auto dict = state_dict(*theirs);
  EXPECT_EQ(dict.find_path("state.1") != nullptr, has_state);
  for (const auto& [name, value] : dict.at("state").dict().at(0).dict()) {
    const bool is_step = name == StateKey("step") && !has_state;
    EXPECT_TRUE(value.tensor().eq(is_step ? 1 : 0).all().item<bool>())
        << name.text();
  }
}

TEST_P(LibTorchTest, RejectsInitializingBetweenBackwardAndStep) {
  auto params = doubles();
  const auto theirs = GetParam().theirs(params);
  if (!theirs->state().empty()) {
    return; // Adagrad never is without state
  }
  make_gradients(params, 0);
  EXPECT_THAT(
      error_of([&] { initialize_state(*theirs); }),
      HasSubstr("parameter 0 has a gradient, but this"));
}

TEST_P(LibTorchTest, RejectsWhatItCannotHold) {
  auto params = doubles();
  const auto theirs = GetParam().theirs(params);
  train(*theirs, params, 0);
  const auto good = state_dict(*theirs).clone();
  const auto error = [&](const StateDict& dict) {
    auto text = error_of([&] { load_state_dict(*theirs, dict); });
    EXPECT_EQ(diff_state_dicts(state_dict(*theirs), good), "");
    return text;
  };
  auto dict = good.clone();
  dict.at("param_groups").list()[0].dict().set("initial_lr", 0.5);
  EXPECT_THAT(
      error(dict),
      AllOf(
          HasSubstr("torch::optim::" + GetParam().name),
          HasSubstr("key \"initial_lr\"")));
  dict = good.clone();
  dict.at("param_groups").list()[0].dict().set("maximize", true);
  EXPECT_THAT(error(dict), HasSubstr("\"maximize\" is true"));
  dict = good.clone();
  dict.at("state").dict().at(1).dict().set("value1", 2.74);
  EXPECT_THAT(
      error(dict),
      AllOf(HasSubstr("parameter \"1\""), HasSubstr("state \"value1\"")));
  dict = good.clone();
  for (const auto& [name, value] : good.at("state").dict().at(1).dict()) {
    if (value.tensor().dim() > 0) {
      dict.at("state").dict().at(1).dict().set(name, torch::zeros({9}));
    }
  }
  EXPECT_THAT(error(dict), HasSubstr("has shape [9], the parameter [7]"));
}

TEST(LibTorchStateTest, RejectsStateThatItsOptionsNeed) {
  auto params = doubles();
  torch::optim::Adam plain(params);
  train(plain, params, 0);
  auto dict = state_dict(plain);
  dict.at("param_groups").list()[0].dict().set("amsgrad", true);
  EXPECT_THAT(
      error_of([&] { load_state_dict(plain, dict); }),
      HasSubstr("there is state, but no \"max_exp_avg_sq\""));
}

TEST(LibTorchStateTest, ABufferThatIsNoneIsMadeByTheNextStep) {
  auto params = doubles();
  torch::optim::SGD sgd(params, torch::optim::SGDOptions(0.1).momentum(0.9));
  auto dict = state_dict(sgd);
  dict.at("state").dict().set(0, StateDict{{"momentum_buffer", nullptr}});
  load_state_dict(sgd, dict);
  train(sgd, params, 0);
  EXPECT_TRUE(state_dict(sgd).at_path("state.0.momentum_buffer").is_tensor());
}

TEST(LibTorchStateTest, RejectsAnUnknownClass) {
  class Mine : public torch::optim::Optimizer {
   public:
    explicit Mine(Params params)
        : Optimizer(
              std::move(params),
              std::make_unique<torch::optim::SGDOptions>(0.1)) {}
    at::Tensor step(LossClosure /*closure*/) override {
      return {};
    }
  };
  Mine mine(doubles());
  EXPECT_THROW(state_dict(mine), c10::TypeError);
  EXPECT_THROW(load_state_dict(mine, {}), c10::TypeError);
  EXPECT_THAT(
      error_of([&] { initialize_state(mine); }),
      AllOf(
          HasSubstr("Mine is not supported"),
          HasSubstr("Derive your optimizer from tessera::optim::Optimizer")));
}

/// The distance to a point, in a bent space: LBFGS needs many steps.
torch::optim::Optimizer::LossClosure distance(
    torch::optim::Optimizer& optimizer,
    const Params& params) {
  return [&optimizer, params] {
    optimizer.zero_grad();
    auto loss = (params[0] - 1).pow(4).sum() + (params[1] + 2).cosh().sum();
    loss.backward();
    return loss;
  };
}

torch::optim::LBFGSOptions lbfgs_options() {
  return torch::optim::LBFGSOptions(0.1).max_iter(3).history_size(5);
}

TEST(LBFGSStateTest, TrainingGoesOnBitByBit) {
  auto params = doubles();
  torch::optim::LBFGS first(params, lbfgs_options());
  for (int step = 0; step < 3; ++step) {
    first.step(distance(first, params));
  }
  auto copies = copies_of(params);
  torch::optim::LBFGS second(copies, lbfgs_options());
  const auto dict =
      state_dict_from_bytes(state_dict_to_bytes(state_dict(first)));
  EXPECT_EQ(dict.at("state").dict().size(), 1u); // with the first parameter
  EXPECT_EQ(dict.at_path("state.0.old_dirs").list().size(), 5u);
  load_state_dict(second, dict);
  EXPECT_EQ(diff_state_dicts(state_dict(second), state_dict(first)), "");
  for (int step = 0; step < 3; ++step) {
    first.step(distance(first, params));
    second.step(distance(second, copies));
  }
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(at::equal(params[i], copies[i])) << i;
  }
}

TEST(LBFGSStateTest, HasPythonsNames) {
  auto params = doubles();
  torch::optim::LBFGS optimizer(params, lbfgs_options());
  optimizer.step(distance(optimizer, params));
  const auto dict = state_dict(optimizer);
  std::string names;
  for (const auto& key : dict.at("state").dict().at(0).dict().keys()) {
    names += key.text() + " ";
  }
  EXPECT_EQ(
      names,
      "func_evals n_iter al d t old_dirs old_stps ro H_diag prev_flat_grad "
      "prev_loss ");
  names.clear();
  for (const auto& key : dict.at("param_groups").list()[0].dict().keys()) {
    names += key.text() + " ";
  }
  EXPECT_EQ(
      names,
      "lr max_iter max_eval tolerance_grad tolerance_change history_size "
      "line_search_fn params ");
}

TEST(LBFGSStateTest, TakesPythonsInitialDiagonal) {
  auto params = doubles();
  torch::optim::LBFGS optimizer(params, lbfgs_options());
  optimizer.step(distance(optimizer, params));
  auto dict = state_dict(optimizer).clone();
  dict.at("state").dict().at(0).dict().set("H_diag", 1);
  load_state_dict(optimizer, dict);
  EXPECT_EQ(
      state_dict(optimizer).at_path("state.0.H_diag").tensor().item<double>(),
      1);
}

TEST(LBFGSStateTest, InitialStateHasOneEvaluation) {
  auto params = doubles();
  torch::optim::LBFGS optimizer(params, lbfgs_options());
  initialize_state(optimizer);
  const auto dict = state_dict(optimizer);
  EXPECT_EQ(dict.at_path("state.0.func_evals").to_int(), 1);
  load_state_dict(optimizer, dict);
  optimizer.step(distance(optimizer, params));
}

TEST(LBFGSStateTest, RejectsWhatDoesNotFit) {
  auto params = doubles();
  torch::optim::LBFGS optimizer(params, lbfgs_options());
  optimizer.step(distance(optimizer, params));
  const auto good = state_dict(optimizer).clone();
  const auto with = [&](const char* name, StateValue value) {
    auto dict = good.clone();
    dict.at("state").dict().at(0).dict().set(name, std::move(value));
    auto text = error_of([&] { load_state_dict(optimizer, dict); });
    EXPECT_EQ(diff_state_dicts(state_dict(optimizer), good), "");
    return text;
  };
  EXPECT_THAT(with("d", torch::zeros({3})), HasSubstr("of 19 elements"));
  EXPECT_THAT(with("old_dirs", 1), HasSubstr("\"old_dirs\" is of kind int"));
  EXPECT_THAT(
      with("old_stps", StateList{torch::zeros({3})}),
      HasSubstr("of 19 elements"));
  EXPECT_THAT(with("n_iter", 1.5), HasSubstr("must be an int"));
  EXPECT_THAT(with("t", "x"), HasSubstr("\"t\" must be a number"));
  EXPECT_THAT(with("H_diag", nullptr), HasSubstr("\"H_diag\""));
  EXPECT_THAT(with("value1", 2.74), HasSubstr("state \"value1\""));
  auto dict = good.clone();
  dict.at("state").dict().at(0).dict().erase("ro");
  EXPECT_THAT(
      error_of([&] { load_state_dict(optimizer, dict); }),
      HasSubstr("no \"ro\""));
  dict = good.clone();
  dict.at("state").dict().set(1, good.at("state").dict().at(0));
  EXPECT_THAT(
      error_of([&] { load_state_dict(optimizer, dict); }),
      HasSubstr("keeps its state with the first parameter"));
}

TEST(LBFGSStateTest, RejectsShards) {
  tessera::testing::on_ranks(2, [](const Group& world) {
    // One element: the second rank's shard is empty. In a group of one the
    // shard is the whole parameter.
    for (const Group& group : {world, world.alone()}) {
      torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(false));
      fully_shard(*linear, FullyShardOptions().group(group));
      torch::optim::LBFGS optimizer(parameters(*linear));
      EXPECT_THAT(
          error_of([&] { state_dict(optimizer); }),
          HasSubstr("LBFGS has a shard as parameter 0"));
      EXPECT_THROW(initialize_state(optimizer), c10::NotImplementedError);
    }
  });
}

} // namespace
} // namespace tessera::optim
