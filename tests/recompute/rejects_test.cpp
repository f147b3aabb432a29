// What recompute() rejects, and what passes through it.
#include <tessera/recompute/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recompute/support.h"
#include "support/errors.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using namespace tessera::testing::recomputation; // NOLINT: likewise
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

TEST(RecomputeTest, RejectsInputsChangedSinceForward) {
  const auto x = leaf({3});
  auto h = x * 2;
  const auto y = recompute([](const at::Tensor& in) { return in.exp(); }, h);
  h.add_(1);
  EXPECT_THAT(
      error_of([&] { y.sum().backward(); }),
      HasSubstr("modified by an inplace operation"));

  auto data = noise({3});
  const auto z =
      recompute([x](const at::Tensor& in) { return in.mul_(2) * x; }, data);
  EXPECT_THAT(
      error_of([&] { z.sum().backward(); }),
      HasSubstr("modified by an inplace operation"));
}

TEST(RecomputeTest, RejectsParametersChangedSinceForward) {
  Linear linear(kWidth, 2);
  const auto y = recompute(linear, noise({3, kWidth}));
  {
    torch::NoGradGuard no_grad;
    linear->bias.add_(1);
  }
  EXPECT_THAT(
      error_of([&] { y.sum().backward(); }),
      AllOf(
          HasSubstr("[recompute] a parameter Float [2]"),
          HasSubstr("changed in place"),
          HasSubstr("at version 2, expected 1"))); // 1: initialized
}

TEST(RecomputeTest, RejectsASecondRunThatGivesSomethingElse) {
  const auto second_run_of = [](const std::function<Tensors(bool)>& outputs) {
    bool again = false;
    const auto first = recompute(
        [&](const Tensors&) { return outputs(std::exchange(again, true)); },
        {leaf({2})});
    return error_of([&] { first.front().sum().backward(); });
  };
  const auto x = leaf({2, 3});
  EXPECT_THAT(
      second_run_of([&](bool again) {
        return Tensors{x.exp(), again ? x.narrow(1, 0, 2) : x};
      }),
      HasSubstr(
          "[recompute] output 1 of the function was Float [2, 3] in forward and Float [2, 2] when backward ran it again"));
  EXPECT_THAT(
      second_run_of([&](bool again) {
        return Tensors{again ? x.to(at::kDouble) : x.exp()};
      }),
      HasSubstr("was Float [2, 3] in forward and Double [2, 3] when"));
  EXPECT_THAT(
      second_run_of(
          [&](bool again) { return Tensors{again ? x.detach() : x.exp()}; }),
      HasSubstr("and Float [2, 3] without gradient when"));
  EXPECT_THAT(
      second_run_of([&](bool again) {
        return Tensors{x.exp(), again ? at::Tensor() : x.exp()};
      }),
      HasSubstr(
          "output 1 of the function was Float [2, 3] in forward and undefined"));
  EXPECT_THAT(
      second_run_of([&](bool again) {
        return again ? Tensors{x.exp()} : Tensors{x.exp(), x};
      }),
      HasSubstr("gave 2 outputs in forward and 1 when backward ran it again"));
}

TEST(RecomputeTest, RejectsASecondRunThatUsesOtherParameters) {
  const auto experts = Tensors{leaf({3}), leaf({3}, 1)};
  size_t turn = 0;
  const auto y = recompute(
      [&](const at::Tensor& in) { return in * experts[turn++ % 2]; },
      noise({3}));
  EXPECT_THAT(
      error_of([&] { y.sum().backward(); }),
      AllOf(
          HasSubstr("[recompute] the function used parameters"),
          HasSubstr("1 times in forward and 1 times when"),
          HasSubstr("not the same")));
  EXPECT_FALSE(experts[0].grad().defined());
  EXPECT_FALSE(experts[1].grad().defined());
}

TEST(RecomputeTest, WhatTheSecondRunThrowsComesOutOfBackward) {
  const auto x = leaf({3});
  bool fails = false;
  const auto fn = [&](const at::Tensor& in) {
    const auto y = torch::dropout(in, 0.5, true).exp();
    if (fails) {
      throw std::out_of_range("on purpose");
    }
    return y;
  };
  const auto y = recompute(fn, x);
  torch::manual_seed(10);
  const auto expected = torch::rand({2});
  torch::manual_seed(10);
  fails = true;
  EXPECT_THROW(y.sum().backward(), std::out_of_range);
  expect_same(torch::rand({2}), expected); // the stream was put back
  EXPECT_FALSE(x.grad().defined());
  fails = false;
  recompute(fn, x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

} // namespace
} // namespace tessera
