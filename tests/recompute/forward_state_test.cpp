// The second run sees the random numbers and the autocast of the first.
#include <tessera/recompute/recompute.h>

#include <ATen/autocast_mode.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recompute/support.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using namespace tessera::testing::recomputation; // NOLINT: likewise
using ::testing::ElementsAre;
using torch::nn::Linear;

TEST(RecomputeTest, DropoutDropsTheSameAgain) {
  for (const bool preserve : {true, false}) {
    const auto x = torch::ones({1000}).requires_grad_();
    torch::manual_seed(5);
    const auto y = recompute(
        [](const at::Tensor& in) {
          return torch::dropout(in, 0.5, true) * torch::rand({1000});
        },
        x,
        RecomputeOptions().preserve_rng_state(preserve));
    const auto before = torch::rand({2}); // the stream goes on
    y.sum().backward();
    // The function is linear: its gradient at 1 is its value.
    EXPECT_EQ(torch::equal(x.grad(), y), preserve);

    const auto after = torch::rand({2});
    torch::manual_seed(5);
    torch::dropout(torch::ones({1000}), 0.5, true);
    torch::rand({1000});
    EXPECT_TRUE(torch::equal(torch::rand({2}), before));
    EXPECT_EQ(torch::equal(torch::rand({2}), after), preserve);
  }
}

/// Autocast for the CPU, as one writes it in C++.
class Autocast {
 public:
  explicit Autocast(at::ScalarType dtype, bool caches = true) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_cache_enabled(caches);
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(true);
  }
};

TEST(RecomputeTest, AFunctionKnowsWhetherItRunsAgain) {
  std::vector<bool> runs;
  const auto x = torch::ones({2}).requires_grad_();
  const auto inner = [&](const at::Tensor& in) {
    runs.push_back(is_recomputing());
    return in * in;
  };
  const auto y =
      recompute([&](const at::Tensor& in) { return recompute(inner, in); }, x);
  EXPECT_FALSE(is_recomputing());
  y.sum().backward();
  EXPECT_THAT(runs, ElementsAre(false, true, true));
  EXPECT_FALSE(is_recomputing());
}

TEST(RecomputeTest, AutocastIsAsItWasInForward) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool caches : {true, false}) {
      for (const bool backward_inside : {true, false}) {
        SCOPED_TRACE(c10::toString(dtype));
        expect_no_difference([&](Caller call) {
          torch::manual_seed(6);
          Linear first(kWidth, kWidth);
          Linear second(kWidth, kWidth);
          std::vector<at::ScalarType> seen;
          at::Tensor y;
          {
            Autocast autocast(dtype, caches);
            const auto twice = [&](const at::Tensor& in) mutable {
              seen.push_back(first(in).scalar_type());
              EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), caches);
              return first(second(first(in).relu()).relu());
            };
            y = call(second, call(twice, noise({3, kWidth})));
            if (backward_inside) {
              y.to(at::kFloat).square().sum().backward();
            }
          }
          if (!backward_inside) {
            y.to(at::kFloat).square().sum().backward();
          }
          EXPECT_EQ(seen.size(), call.recomputes ? 2 : 1);
          EXPECT_EQ(seen.front(), dtype);
          EXPECT_EQ(seen.back(), dtype);
          EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
          EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
          return Tensors{first->weight.grad(), first->bias.grad()};
        });
      }
    }
  }
}

TEST(RecomputeTest, AForwardWithoutAutocastIsRerunWithout) {
  Linear linear(kWidth, kWidth);
  std::vector<at::ScalarType> seen;
  const auto y = recompute(
      [&](const at::Tensor& in) {
        const auto out = linear(in);
        seen.push_back(out.scalar_type());
        return out;
      },
      noise({3, kWidth}));
  Autocast autocast(at::kBFloat16);
  y.sum().backward();
  EXPECT_THAT(seen, ElementsAre(at::kFloat, at::kFloat));
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU)); // of backward
}

TEST(RecomputeTest, ACastKeptByAutocastTiesNoTwoRuns) {
  expect_no_difference([](Caller call) {
    torch::manual_seed(15);
    Linear shared(kWidth, kWidth);
    at::Tensor x = noise({3, kWidth});
    {
      // Without care the second finds the weight cast, and its rerun does not.
      Autocast autocast(at::kBFloat16);
      at::autocast::set_autocast_cache_enabled(call.recomputes);
      x = call(shared, shared(x));
    }
    x.to(at::kFloat).sum().backward();
    return Tensors{shared->weight.grad(), shared->bias.grad()};
  });
}

} // namespace
} // namespace tessera
