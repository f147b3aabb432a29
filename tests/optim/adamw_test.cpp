#include <tessera/optim/adamw.h>

#include "optim/params.h"
#include "support/ranks.h"

namespace tessera::optim {
namespace {

using ::testing::HasSubstr;

class AdamWTest : public ::testing::TestWithParam<bool> {};

TEST_P(AdamWTest, AgreesWithLibTorchsOwn) {
  const bool amsgrad = GetParam();
  auto ours = make_params();
  auto theirs = make_params();
  AdamW fused(ours, AdamWOptions(1e-2).weight_decay(0.1).amsgrad(amsgrad));
  torch::optim::AdamW plain(
      theirs,
      torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(amsgrad));
  for (int step = 0; step < 100; ++step) {
    make_gradients(ours, step);
    make_gradients(theirs, step);
    fused.step();
    plain.step();
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    const double tolerance =
        ours[i].scalar_type() == at::kDouble ? 1e-12 : 1e-5;
    EXPECT_TRUE(torch::allclose(ours[i], theirs[i], tolerance, tolerance)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Amsgrad, AdamWTest, ::testing::Bool());

TEST(AdamWOptionsTest, SchedulersChangeTheLearningRate) {
  auto params = make_params();
  AdamW optimizer(params, 0.1);
  torch::optim::StepLR scheduler(optimizer, 1, 0.5);
  make_gradients(params, 0);
  optimizer.step();
  scheduler.step(); // LibTorch's counts the first as step 0
  scheduler.step();
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.05);
}

TEST(AdamWOptionsTest, MaximizeClimbs) {
  auto params = make_params();
  const auto before = params[1].detach().clone();
  AdamW optimizer(params, AdamWOptions(0.1).weight_decay(0).maximize(true));
  params[1].mutable_grad() = torch::ones_like(params[1]);
  optimizer.step();
  EXPECT_TRUE((params[1] > before).all().item<bool>());
}

TEST(AdamWOptionsTest, ParametersWithoutAGradientKeepNoState) {
  auto params = make_params();
  const auto before = params[0].detach().clone();
  AdamW optimizer(params);
  params[1].mutable_grad() = torch::ones_like(params[1]);
  optimizer.step();
  EXPECT_TRUE(at::equal(params[0], before));
  EXPECT_EQ(optimizer.state().size(), 1u);
}

TEST(AdamWOptionsTest, AClosureGivesTheLoss) {
  auto params = make_params();
  AdamW optimizer(params);
  const auto loss = optimizer.step([&] {
    auto value = params[1].square().sum();
    value.backward();
    return value;
  });
  EXPECT_GT(loss.item<double>(), 0);
}

TEST(AdamWOptionsTest, RejectsOptionsOutOfRange) {
  const auto error_of = [](const AdamWOptions& options) {
    try {
      AdamW optimizer(make_params(), options);
    } catch (const c10::ValueError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_THAT(error_of(AdamWOptions(-1)), HasSubstr("lr is -1"));
  EXPECT_THAT(
      error_of(AdamWOptions().betas({0.9, 1.0})),
      HasSubstr("betas are 0.9 and 1"));
  EXPECT_THAT(error_of(AdamWOptions().eps(-1)), HasSubstr("eps is -1"));
  EXPECT_THAT(
      error_of(AdamWOptions().weight_decay(-1)),
      HasSubstr("weight_decay is -1"));
}

} // namespace
} // namespace tessera::optim
