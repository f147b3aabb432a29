// What all optimizers have in common: steps, groups, options.
#include <tessera/fsdp/fully_shard.h>

#include "optim/makers.h"
#include "optim/params.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::optim {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

class OptimizerTest : public ::testing::TestWithParam<Maker> {};

INSTANTIATE_TEST_SUITE_P(
    All,
    OptimizerTest,
    ::testing::ValuesIn(makers()),
    [](const auto& test) { return test.param.name; });

TEST_P(OptimizerTest, ParametersWithoutAGradientAreLeftAlone) {
  auto params = make_params();
  const auto before = params[0].detach().clone();
  const auto optimizer = GetParam().make(params);
  params[1].mutable_grad() = torch::ones_like(params[1]);
  optimizer->step();
  EXPECT_TRUE(at::equal(params[0], before));
  EXPECT_EQ(optimizer->find_state(params[0]), nullptr);
  EXPECT_NE(optimizer->find_state(params[1]), nullptr);
}

TEST_P(OptimizerTest, EmptyParametersKeepNoState) {
  auto params = make_params();
  const auto optimizer = GetParam().make(params);
  make_gradients(params, 0);
  optimizer->step();
  ASSERT_EQ(params[3].numel(), 0);
  EXPECT_EQ(optimizer->find_state(params[3]), nullptr);
}

TEST_P(OptimizerTest, SchedulersDriveIt) {
  auto params = make_params();
  const auto optimizer = GetParam().make(params);
  const double lr = optimizer->param_groups()[0].options().get_lr();
  torch::optim::StepLR scheduler(*optimizer, 1, 0.5);
  make_gradients(params, 0);
  optimizer->step();
  scheduler.step(); // LibTorch's counts the first as step 0
  scheduler.step();
  EXPECT_DOUBLE_EQ(optimizer->param_groups()[0].options().get_lr(), lr / 2);
  const auto dict = optimizer->state_dict();
  EXPECT_DOUBLE_EQ(dict.at_path("param_groups.0.lr").to_double(), lr / 2);
}

TEST_P(OptimizerTest, AClosureRunsFirstAndGivesTheLoss) {
  auto params = make_params();
  const auto before = params[1].detach().clone();
  const auto optimizer = GetParam().make(params);
  at::NoGradGuard no_grad; // the closure gets gradients all the same
  const auto loss = optimizer->step([&] {
    optimizer->zero_grad();
    auto value = params[1].square().sum();
    value.backward();
    return value;
  });
  EXPECT_DOUBLE_EQ(loss.item<double>(), before.square().sum().item<double>());
  EXPECT_FALSE(at::equal(params[1], before));
}

TEST_P(OptimizerTest, GradientsMayLieInAnotherOrder) {
  const auto start = torch::arange(12, torch::kDouble).reshape({3, 4});
  const auto gradient = torch::arange(12, torch::kDouble).reshape({3, 4}) - 5;
  auto plain = start.clone().requires_grad_();
  auto crossed = start.clone().requires_grad_();
  plain.mutable_grad() = gradient.clone();
  crossed.mutable_grad() = gradient.t().contiguous().t();
  ASSERT_NE(crossed.grad().strides(), crossed.strides());
  GetParam().make({plain})->step();
  GetParam().make({crossed})->step();
  EXPECT_TRUE(at::equal(plain, crossed));
}

TEST_P(OptimizerTest, ParametersMayHaveGaps) {
  const auto storage = torch::arange(24, torch::kDouble).reshape({3, 8});
  auto gaps = storage.slice(1, 0, 8, 2).detach().requires_grad_();
  auto plain = gaps.detach().clone().requires_grad_();
  const auto between = storage.slice(1, 1, 8, 2).clone();
  const auto ours = GetParam().make({gaps});
  const auto theirs = GetParam().make({plain});
  for (int step = 0; step < 3; ++step) {
    gaps.mutable_grad() = torch::full_like(gaps, 1 + step);
    plain.mutable_grad() = torch::full_like(plain, 1 + step);
    ours->step();
    theirs->step();
  }
  EXPECT_TRUE(at::equal(gaps, plain));
  EXPECT_TRUE(at::equal(storage.slice(1, 1, 8, 2), between));
}

TEST_P(OptimizerTest, StateFollowsAParameterThatChangesItsLayout) {
  auto param = torch::arange(24, torch::kDouble).reshape({1, 2, 3, 4});
  auto plain = param.clone().requires_grad_();
  param.requires_grad_();
  const auto ours = GetParam().make({param});
  const auto theirs = GetParam().make({plain});
  for (int step = 0; step < 2; ++step) {
    const auto gradient = torch::arange(24, torch::kDouble).reshape_as(plain);
    param.mutable_grad() = gradient - step;
    plain.mutable_grad() = gradient - step;
    ours->step();
    theirs->step();
    param.mutable_grad() = at::Tensor();
    param.set_data(param.detach().contiguous(at::MemoryFormat::ChannelsLast));
  }
  ASSERT_FALSE(param.is_contiguous());
  EXPECT_TRUE(at::equal(param, plain));
}

TEST_P(OptimizerTest, LowPrecisionFollowsFullPrecision) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    // Whole vectors and a rest.
    torch::manual_seed(3);
    auto full = torch::randn({75}).to(dtype).to(at::kFloat).requires_grad_();
    auto low = full.detach().to(dtype).requires_grad_();
    const auto ours = GetParam().make({low});
    const auto theirs = GetParam().make({full});
    for (int step = 0; step < 5; ++step) {
      full.mutable_grad() = torch::randn({75}).to(dtype).to(at::kFloat);
      low.mutable_grad() = full.grad().to(dtype);
      ours->step();
      theirs->step();
    }
    EXPECT_EQ(low.scalar_type(), dtype);
    const double tolerance = dtype == at::kHalf ? 0.005 : 0.04;
    EXPECT_TRUE(
        torch::allclose(low.to(at::kFloat), full, tolerance, tolerance));
  }
}

TEST_P(OptimizerTest, RejectsSparseGradients) {
  auto param = torch::ones({4, 2}, torch::requires_grad());
  param.mutable_grad() = torch::ones({4, 2}).to_sparse();
  const auto optimizer = GetParam().make({param});
  EXPECT_THAT(
      error_of([&] { optimizer->step(); }),
      AllOf(
          HasSubstr(GetParam().name),
          HasSubstr("parameter 0 of param group 0 has a sparse gradient")));
}

TEST_P(OptimizerTest, InitialStateIsThatOfAStepWithZeroGradients) {
  auto params = make_params();
  params[0].detach()[0][0] = -0.0;
  params[1].set_requires_grad(false);
  std::vector<at::Tensor> before;
  for (const auto& param : params) {
    before.push_back(param.detach().clone());
  }
  const auto optimizer = GetParam().make(params);
  initialize_state(*optimizer);
  for (size_t i = 0; i < params.size(); ++i) {
    // As bytes: 0 and -0 are equal as numbers.
    EXPECT_TRUE(at::equal(
        params[i].detach().view(at::kByte), before[i].view(at::kByte)));
    EXPECT_FALSE(params[i].grad().defined());
    EXPECT_EQ(optimizer->find_state(params[i]) != nullptr, i % 2 == 0) << i;
  }
  for (const auto& [name, value] : *optimizer->find_state(params[0])) {
    const bool is_step = name == StateKey("step");
    EXPECT_TRUE(value.tensor().eq(is_step ? 1 : 0).all().item<bool>())
        << name.text();
  }
}

TEST_P(OptimizerTest, InitializingLeavesStateThatIsThere) {
  auto params = make_params();
  const auto optimizer = GetParam().make(params);
  make_gradients(params, 0);
  optimizer->step();
  const auto before = optimizer->state_dict().clone();
  initialize_state(*optimizer);
  EXPECT_EQ(diff_state_dicts(optimizer->state_dict(), before), "");
}

/// As after a layer was thawed.
TEST_P(OptimizerTest, InitializingAddsTheStateThatIsMissing) {
  auto params = make_params();
  const auto optimizer = GetParam().make(params);
  params[1].set_requires_grad(false);
  make_gradients(params, 0);
  params[1].mutable_grad() = torch::Tensor();
  optimizer->step();
  optimizer->zero_grad();
  const auto before = *optimizer->find_state(params[0]);
  params[1].set_requires_grad(true);
  initialize_state(*optimizer);
  EXPECT_NE(optimizer->find_state(params[1]), nullptr);
  EXPECT_EQ(diff_state_dicts(*optimizer->find_state(params[0]), before), "");
}

TEST_P(OptimizerTest, RejectsInitializingBetweenBackwardAndStep) {
  auto params = make_params();
  const auto optimizer = GetParam().make(params);
  params[1].mutable_grad() = torch::ones_like(params[1]);
  EXPECT_THAT(
      error_of([&] { initialize_state(*optimizer); }),
      HasSubstr("parameter 1 has a gradient, but this"));
  EXPECT_EQ(optimizer->find_state(params[0]), nullptr);
}

TEST_P(OptimizerTest, ShardsMatchASingleProcess) {
  tessera::testing::on_ranks(2, [&](const Group&) {
    const auto make_model = [] {
      torch::manual_seed(0);
      return torch::nn::Linear(3, 5);
    };
    auto plain = make_model();
    auto sharded = make_model();
    fully_shard(*sharded);
    const auto plain_optimizer = GetParam().make(plain->parameters());
    const auto optimizer = GetParam().make(parameters(*sharded));
    const auto input = torch::arange(6, torch::kFloat).reshape({2, 3});
    at::Tensor loss;
    at::Tensor plain_loss;
    for (int step = 0; step < 4; ++step) {
      plain_loss = plain->forward(input).square().mean();
      loss = sharded->forward(input).square().mean();
      plain_loss.backward();
      loss.backward();
      plain_optimizer->step();
      optimizer->step();
      plain_optimizer->zero_grad();
      optimizer->zero_grad();
    }
    // The last loss has seen three updates.
    EXPECT_TRUE(torch::allclose(loss, plain_loss, 1e-5, 1e-6))
        << loss << plain_loss;
  });
}

TEST(OptionsTest, GroupsTakeWhatTheyDidNotSetFromTheDefaults) {
  auto params = make_params();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(
      std::vector{params[0]},
      // 1e-3 is what an AdamW has by itself: it is chosen all the same.
      std::make_unique<AdamWOptions>(AdamWOptions(1e-3).weight_decay(0)));
  groups.emplace_back(std::vector{params[1]});
  AdamW optimizer(groups, AdamWOptions(0.5).eps(0.25).extra("tag", "body"));
  const auto added = [&](size_t group) -> const AdamWOptions& {
    return static_cast<const AdamWOptions&>(
        optimizer.param_groups()[group].options());
  };
  EXPECT_EQ(added(0).lr(), 1e-3);
  EXPECT_EQ(added(0).weight_decay(), 0);
  EXPECT_EQ(added(0).eps(), 0.25);
  EXPECT_EQ(added(0).extra().at("tag").string(), "body");
  EXPECT_EQ(added(1).lr(), 0.5);

  // A group that is added later, by LibTorch's own function.
  OptimizerParamGroup later(
      {params[2]}, std::make_unique<AdamWOptions>(AdamWOptions().eps(0.125)));
  optimizer.add_param_group(later);
  const auto dict = optimizer.state_dict();
  EXPECT_EQ(dict.at_path("param_groups.2.lr").to_double(), 0.5);
  EXPECT_EQ(dict.at_path("param_groups.2.eps").to_double(), 0.125);
  optimizer.step();
  EXPECT_EQ(added(2).lr(), 0.5);
}

TEST(OptionsTest, AGroupThatLibTorchAddedIsRefusedAtTheNextStep) {
  const auto params = make_params();
  const auto before = params[0].detach().clone();
  params[0].mutable_grad() = torch::ones_like(params[0]);
  AdamW optimizer(std::vector{params[0]}, 0.5);
  OptimizerParamGroup later(
      {params[1]}, std::make_unique<AdamWOptions>(AdamWOptions(1e-3)));
  static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(later);
  EXPECT_THAT(
      error_of([&] { optimizer.step(); }),
      HasSubstr("param group 1 was added through a torch::optim::Optimizer&"));
  EXPECT_TRUE(torch::equal(params[0], before));
  optimizer.param_groups().pop_back();
  optimizer.add_param_group(later);
  EXPECT_NO_THROW(optimizer.step());
  EXPECT_FALSE(torch::equal(params[0], before));
}

TEST(OptionsTest, RejectsOptionsOfAnotherClass) {
  const auto params = make_params();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(params, std::make_unique<torch::optim::AdamWOptions>());
  EXPECT_THAT(
      error_of([&] { AdamW optimizer(groups); }),
      AllOf(
          HasSubstr("options of class torch::optim::AdamWOptions"),
          HasSubstr("Give it tessera::optim::AdamWOptions")));
}

TEST(OptionsTest, RejectsValuesOutOfRange) {
  const auto error = [](const auto& make) {
    return error_of([&] { make(make_params()); });
  };
  const auto adamw = [&](const AdamWOptions& options) {
    return error([&](auto params) { AdamW optimizer(params, options); });
  };
  const auto sgd = [&](const SGDOptions& options) {
    return error([&](auto params) { SGD optimizer(params, options); });
  };
  EXPECT_THAT(adamw(-1), HasSubstr("[AdamW] lr is -1, must be 0 or more."));
  EXPECT_THAT(adamw(std::nan("")), HasSubstr("lr is nan"));
  EXPECT_THAT(
      adamw(AdamWOptions().betas({0.9, 1.0})),
      HasSubstr("betas are 0.9 and 1, must be 0 or more and below 1."));
  EXPECT_THAT(adamw(AdamWOptions().eps(-1)), HasSubstr("eps is -1"));
  EXPECT_THAT(
      adamw(AdamWOptions().weight_decay(-1)), HasSubstr("weight_decay is -1"));
  EXPECT_THAT(sgd(SGDOptions().momentum(-1)), HasSubstr("momentum is -1"));
  EXPECT_THAT(
      sgd(SGDOptions().nesterov(true)),
      HasSubstr("nesterov needs momentum above 0 and dampening 0."));
  EXPECT_THAT(
      error([](auto params) {
        Adagrad optimizer(params, AdagradOptions().lr_decay(-1));
      }),
      HasSubstr("[Adagrad] lr_decay is -1"));
  EXPECT_THAT(
      error([](auto params) {
        RMSprop optimizer(params, RMSpropOptions().alpha(-1));
      }),
      HasSubstr("[RMSprop] alpha is -1"));
}

TEST(OptionsTest, CapturableOfAdamAndAdamWIsKept) {
  const auto expect_kept = [](auto optimizer, auto plain) {
    const StateDict dict = optimizer.state_dict();
    const auto is_capturable = [](const StateDict& state) {
      return state.at("param_groups").list()[0].dict().at("capturable");
    };
    EXPECT_TRUE(is_capturable(dict).to_bool());
    EXPECT_FALSE(is_capturable(plain.state_dict()).to_bool());
    plain.load_state_dict(dict);
    EXPECT_TRUE(is_capturable(plain.state_dict()).to_bool());
  };
  const std::vector<at::Tensor> params{torch::ones({2}).requires_grad_()};
  expect_kept(Adam(params, AdamOptions().capturable(true)), Adam(params));
  expect_kept(AdamW(params, AdamWOptions().capturable(true)), AdamW(params));
}

TEST(OptionsTest, RejectsDifferentiableAndCapturable) {
  EXPECT_THROW(AdamOptions().differentiable(true), c10::NotImplementedError);
  EXPECT_THAT(
      error_of([] { SGDOptions().differentiable(true); }),
      HasSubstr("Leave it false"));
  EXPECT_THAT(
      error_of([] { RMSpropOptions().capturable(true); }),
      HasSubstr("capture_objection"));
  SGDOptions().differentiable(false).capturable(false);
}

/// Follows the sign of the gradient, and counts.
struct SignOptions : OptionsOf<SignOptions> {
  TESSERA_OPTION(double, lr){0.5};

 public:
  std::vector<OptionField> fields() override {
    return {{"lr", lr_, OptionRange::NotNegative}};
  }
};

class Sign : public Optimizer {
 public:
  explicit Sign(std::vector<at::Tensor> params)
      : Optimizer(
            "Sign",
            {OptimizerParamGroup(std::move(params))},
            std::make_unique<SignOptions>()) {}

 protected:
  static constexpr StateField kCount{"count", StateField::Kind::HostScalar};

  void update(const Options& options, Batch& batch) override {
    for (auto& count : batch.state(kCount, 10)) {
      count.add_(1);
    }
    for (size_t i = 0; i < batch.params.size(); ++i) {
      batch.params[i].sub_(batch.gradients[i].sign(), options.get_lr());
    }
  }
  std::vector<StateField> state_fields() const override {
    return {kCount};
  }
};

TEST(OwnOptimizerTest, ADerivedClassHasDictionariesToo) {
  auto param = torch::zeros({2}, torch::requires_grad());
  param.mutable_grad() = torch::tensor({3.0F, -2.0F});
  Sign optimizer({param});
  optimizer.step();
  EXPECT_TRUE(at::equal(param, torch::tensor({-0.5F, 0.5F})));
  const auto dict = state_dict(optimizer);
  EXPECT_EQ(dict.at_path("state.0.count").tensor().item<float>(), 11);
  Sign other({param});
  load_state_dict(other, dict);
  EXPECT_EQ(diff_state_dicts(state_dict(other), dict), "");
}

} // namespace
} // namespace tessera::optim
