#include <tessera/optim/adam.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/train/grad_scaler.h>

#include <cmath>
#include <limits>

#include "support/errors.h"
#include "support/ranks.h"
#include "train/front_ends.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor leaf(std::vector<int64_t> sizes, at::ScalarType dtype = at::kFloat) {
  return torch::ones(sizes, dtype).requires_grad_();
}

/// An iteration in which the gradient is what it is.
void step_with(
    GradScaler& scaler,
    torch::optim::Optimizer& optimizer,
    const at::Tensor& param,
    const at::Tensor& gradient) {
  scaler.scale(torch::ones({}));
  param.mutable_grad() = gradient.clone();
  scaler.step(optimizer);
  scaler.update();
}

TEST(GradScalerTest, StateIsPythonsAndRoundTrips) {
  GradScaler scaler(GradScalerOptions().init_scale(8).growth_interval(5));
  const auto param = leaf({2});
  optim::SGD optimizer({param}, 0.5);
  for (int i = 0; i < 3; ++i) {
    step_with(scaler, optimizer, param, torch::ones({2}));
  }
  const StateDict state = scaler.state_dict();
  EXPECT_EQ(
      state,
      (StateDict{
          {"scale", 8.0},
          {"growth_factor", 2.0},
          {"backoff_factor", 0.5},
          {"growth_interval", 5},
          {"_growth_tracker", 3}}));
  for (const bool has_scaled : {false, true}) {
    GradScaler other;
    if (has_scaled) {
      other.scale(torch::ones({}));
    }
    other.load_state_dict(state);
    EXPECT_EQ(other.state_dict(), state);
    EXPECT_EQ(other.scale(torch::ones({})).item<float>(), 8);
    const auto theirs = leaf({2});
    optim::SGD next({theirs}, 0.5);
    for (int i = 0; i < 2; ++i) {
      step_with(other, next, theirs, torch::ones({2}));
    }
    EXPECT_EQ(other.get_scale(), 16); // five in a row
  }
}

TEST(GradScalerTest, RejectsStateThatDoesNotFit) {
  GradScaler scaler;
  const StateDict good = scaler.state_dict();
  EXPECT_THAT(
      error_of([&] { scaler.load_state_dict({}); }),
      HasSubstr("[GradScaler::load_state_dict] the dictionary is empty"));
  for (const auto& [key, value] : std::vector<std::pair<const char*, double>>{
           {"scale", 0}, {"growth_factor", 1}, {"backoff_factor", 1}}) {
    StateDict bad = good;
    bad.set(key, value);
    EXPECT_THAT(
        error_of([&] { scaler.load_state_dict(bad); }),
        HasSubstr("; expected"));
  }
  StateDict short_one = good;
  short_one.erase("_growth_tracker");
  EXPECT_THAT(
      error_of([&] { scaler.load_state_dict(short_one); }),
      HasSubstr("_growth_tracker"));
  EXPECT_EQ(scaler.state_dict(), good);
}

TEST(GradScalerTest, OffItOnlySteps) {
  GradScaler scaler(GradScalerOptions().enabled(false));
  const auto param = leaf({2});
  optim::SGD optimizer({param}, 0.5);
  const auto loss = torch::full({}, 3.0);
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  param.mutable_grad() = torch::full({2}, kInfinity);
  scaler.unscale_(optimizer);
  const auto returned = scaler.step(optimizer, [&] { return loss; });
  EXPECT_TRUE(returned.is_same(loss));
  scaler.update();
  EXPECT_TRUE(std::isinf(param[0].item<double>()));
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_TRUE(scaler.state_dict().empty());
  EXPECT_FALSE(scaler.skipped());
}

TEST(GradScalerTest, TakesGradientsOfEveryKindAtOnce) {
  GradScaler scaler(GradScalerOptions().init_scale(4));
  const std::vector<at::Tensor> params{
      leaf({3}),
      leaf({2, 2}, at::kDouble),
      leaf({5}, at::kBFloat16),
      leaf({2}, at::kComplexDouble),
      leaf({0}),
      leaf({7}), // without a gradient
      torch::ones({4, 2}).t().requires_grad_(), // not contiguous
      leaf({4, 2})}; // sparse
  torch::optim::SGD optimizer(params, 0.5);
  for (const int spoiled : {-1, 1, 2, 3, 6, 7}) {
    scaler.scale(torch::ones({}));
    for (size_t i = 0; i < params.size(); ++i) {
      auto gradient = torch::full_like(params[i].detach(), 8);
      if (static_cast<int>(i) == spoiled) {
        at::Tensor first = gradient;
        while (first.dim() > 0) {
          first = first[0];
        }
        first.fill_(kInfinity);
      }
      if (i == 3) { // autograd may leave a conjugated view
        gradient = gradient.conj();
      }
      params[i].mutable_grad() = i == 5 ? at::Tensor()
          : i == 7                      ? gradient.to_sparse(1)
                                        : gradient;
    }
    scaler.unscale_(optimizer);
    if (spoiled == -1) {
      for (const size_t i : {0, 1, 2, 3, 6, 7}) {
        EXPECT_TRUE(torch::equal(
            params[i].grad().to_dense(), torch::full_like(params[i], 2)))
            << i;
      }
    }
    scaler.update();
    EXPECT_EQ(scaler.skipped(), spoiled != -1) << spoiled;
    scaler.update(4.0);
  }
}

TEST(GradScalerTest, ScalesSeveralLosses) {
  GradScaler scaler(GradScalerOptions().init_scale(4));
  const auto scaled =
      scaler.scale({torch::ones({2}), torch::ones({}, at::kDouble)});
  EXPECT_TRUE(torch::equal(scaled.at(0), torch::full({2}, 4.0f)));
  EXPECT_EQ(scaled.at(1).scalar_type(), at::kDouble);
  EXPECT_EQ(scaled.at(1).item<double>(), 4);
}

TEST(GradScalerTest, RejectsCallsOutOfOrder) {
  GradScaler scaler;
  const auto param = leaf({2});
  optim::SGD optimizer({param}, 0.5);
  param.mutable_grad() = torch::ones({2});
  EXPECT_THAT(
      error_of([&] { scaler.step(optimizer); }),
      HasSubstr("[GradScaler::step] no loss was scaled yet"));
  scaler.scale(torch::ones({}));
  EXPECT_THAT(
      error_of([&] { scaler.update(); }),
      HasSubstr("[GradScaler::update] no gradient was unscaled"));
  scaler.unscale_(optimizer);
  EXPECT_THAT(
      error_of([&] { scaler.unscale_(optimizer); }),
      HasSubstr("unscale_() has been called for this optimizer"));
  EXPECT_TRUE(torch::equal(param.grad(), torch::full({2}, 1.0f / 65536)));
  scaler.step(optimizer);
  EXPECT_THAT(
      error_of([&] { scaler.step(optimizer); }),
      HasSubstr("step() has been called for this optimizer"));
  EXPECT_THAT(
      error_of([&] { scaler.unscale_(optimizer); }),
      HasSubstr("it is called after step()"));
  EXPECT_THAT(
      error_of([&] { scaler.update(0.0); }),
      HasSubstr("the scale is 0; expected a positive number"));
  scaler.update();
  EXPECT_THAT(
      error_of([&] { scaler.step(optimizer, [] { return torch::ones({}); }); }),
      HasSubstr("a closure is not supported"));
  torch::nn::Linear model(2, 2);
  EXPECT_THAT(
      error_of([&] { scaler.clip_grad_norm_(model, 1.0); }),
      HasSubstr("gradients are still scaled"));
}

TEST(GradScalerTest, RejectsWhatItCannotScale) {
  EXPECT_THAT(
      error_of([] { GradScaler(GradScalerOptions().growth_factor(1)); }),
      HasSubstr("[GradScaler] growth_factor is 1; expected more than 1."));
  EXPECT_THAT(
      error_of([] { GradScaler(GradScalerOptions().backoff_factor(1)); }),
      HasSubstr("backoff_factor is 1"));
  EXPECT_THAT(
      error_of([] { GradScaler().set_growth_interval(0); }),
      HasSubstr("[GradScaler::set_growth_interval] growth_interval is 0"));
  GradScaler scaler;
  scaler.scale(torch::ones({}));
  const auto param = leaf({2}, at::kHalf);
  torch::optim::SGD optimizer({leaf({1}), param}, 0.5);
  EXPECT_THAT(
      error_of([&] { scaler.unscale_(optimizer); }),
      HasSubstr("parameter 1 of param group 0 is in float16"));
}

/// Two steps, of which the kernel leaves out the first.
void expect_kernel_skips(
    torch::optim::Optimizer& optimizer,
    const at::Tensor& param,
    torch::optim::Optimizer& reference,
    const at::Tensor& other) {
  auto& skip = dynamic_cast<optim::DeviceSkip&>(optimizer);
  param.mutable_grad() = torch::full({3}, kInfinity);
  ASSERT_TRUE(skip.skip_where(torch::ones({})));
  optimizer.step();
  EXPECT_TRUE(torch::equal(param.detach(), torch::ones({3})));
  param.mutable_grad() = torch::full({3}, 2.0f);
  other.mutable_grad() = torch::full({3}, 2.0f);
  ASSERT_TRUE(skip.skip_where(torch::zeros({})));
  optimizer.step();
  ASSERT_TRUE(skip.skip_where(at::Tensor()));
  optimizer.step();
  reference.step();
  reference.step();
  EXPECT_TRUE(torch::equal(param, other));
}

TEST(DeviceSkipTest, KernelsLeaveOutSteps) {
  for (const bool amsgrad : {false, true}) {
    const auto param = leaf({3});
    const auto other = leaf({3});
    const auto options = optim::AdamOptions(0.1).amsgrad(amsgrad);
    optim::Adam adam({param}, options);
    optim::Adam reference({other}, options);
    expect_kernel_skips(adam, param, reference, other);
    EXPECT_EQ(diff_state_dicts(adam.state_dict(), reference.state_dict()), "");
  }
  const auto param = leaf({3});
  const auto other = leaf({3});
  optim::NamedOptimizer named(
      {{"p", param}},
      std::make_unique<optim::AdamW>(std::vector<at::Tensor>{param}, 0.1));
  optim::AdamW reference({other}, 0.1);
  expect_kernel_skips(named, param, reference, other);
  optim::NamedOptimizer cannot(
      {{"p", param}},
      std::make_unique<optim::SGD>(std::vector<at::Tensor>{param}, 0.1));
  EXPECT_FALSE(cannot.skip_where(torch::ones({})));
}

TEST(DeviceSkipTest, ZeroAsksItsLocalOptimizer) {
  on_ranks(2, [](const Group&) {
    const auto param = leaf({3});
    const auto other = leaf({3});
    ZeroRedundancyOptimizer zero({param}, optimizer_class<optim::AdamW>(0.1));
    optim::AdamW reference({other}, 0.1);
    expect_kernel_skips(zero, param, reference, other);
  });
}

} // namespace
} // namespace tessera
