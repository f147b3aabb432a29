// Against cross_entropy_loss(linear(hidden, weight), targets), on one rank.
#include <tessera/nn/linear_cross_entropy.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "nn/chunked_loss.h"
#include "support/errors.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokens = 19;
constexpr int64_t kWidth = 7;
constexpr int64_t kClasses = 23;

struct Case {
  at::Tensor hidden;
  at::Tensor weight;
  at::Tensor targets;
};

Case make_case(at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(5);
  return {
      torch::randn({kTokens, kWidth}, torch::kDouble)
          .to(dtype)
          .requires_grad_(),
      torch::randn({kClasses, kWidth}, torch::kDouble)
          .to(dtype)
          .requires_grad_(),
      torch::randint(0, kClasses, {kTokens}, torch::kLong)};
}

at::Tensor composed(const Case& one) {
  return torch::cross_entropy_loss(
      torch::linear(one.hidden, one.weight), one.targets);
}

LinearCrossEntropyOptions in_chunks(int64_t tokens) {
  return LinearCrossEntropyOptions().batch_chunk_size(tokens);
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

std::vector<at::Tensor> gradients(
    const at::Tensor& loss,
    const Case& one,
    bool retain_graph = false) {
  return torch::autograd::grad(
      {loss}, {one.hidden, one.weight}, {}, retain_graph);
}

/// Turns autocast on for the CPU, as with torch.autocast("cpu").
class Autocast {
 public:
  explicit Autocast(at::ScalarType dtype) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
  }
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

class ChunkSizeTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(ChunkSizeTest, LossAndGradientsAreThoseOfTheLogits) {
  const Case one = make_case();
  const auto expected = composed(one);
  const auto loss = linear_cross_entropy(
      one.hidden, one.weight, one.targets, in_chunks(GetParam()));
  EXPECT_LE(difference(loss, expected), 1e-14);
  const auto theirs = gradients(expected, one);
  const auto ours = gradients(loss, one);
  EXPECT_LE(difference(ours[0], theirs[0]), 1e-15);
  EXPECT_LE(difference(ours[1], theirs[1]), 1e-15);
}

INSTANTIATE_TEST_SUITE_P(
    Tokens,
    ChunkSizeTest,
    ::testing::Values(1, 4, 18, 19, 20, 1000));

/// What gradcheck does: the derivative by each element, from both sides.
TEST(LinearCrossEntropyTest, GradientsAreDerivatives) {
  const Case one = make_case();
  const auto bias = torch::randn({kClasses}, torch::kDouble).requires_grad_();
  const auto options = in_chunks(4)
                           .linear_bias(bias)
                           .weight(torch::rand({kClasses}, torch::kDouble))
                           .label_smoothing(0.1)
                           .ignore_index(one.targets[2].item<int64_t>());
  const auto value = [&] {
    torch::NoGradGuard no_grad;
    return linear_cross_entropy(one.hidden, one.weight, one.targets, options)
        .item<double>();
  };
  linear_cross_entropy(one.hidden, one.weight, one.targets, options).backward();
  constexpr double kStep = 1e-6;
  for (const at::Tensor& tensor : {one.hidden, one.weight, bias}) {
    const auto flat = tensor.detach().view(-1);
    const auto gradient = tensor.grad().view(-1);
    for (int64_t i = 0; i < flat.numel(); ++i) {
      const double before = flat[i].item<double>();
      flat[i].fill_(before + kStep);
      const double above = value();
      flat[i].fill_(before - kStep);
      const double below = value();
      flat[i].fill_(before);
      EXPECT_NEAR(
          gradient[i].item<double>(), (above - below) / (2 * kStep), 1e-8);
    }
  }
}

TEST(LinearCrossEntropyTest, LeadingDimensionsAreTokens) {
  const Case one = make_case();
  const auto rows = one.hidden.detach().narrow(0, 0, 18).view({2, 9, kWidth});
  const auto targets = one.targets.narrow(0, 0, 18).view({2, 9});
  const auto options = LinearCrossEntropyOptions().reduction(torch::kNone);
  const auto by_token =
      linear_cross_entropy(rows, one.weight.detach(), targets, options);
  EXPECT_EQ(by_token.sizes(), targets.sizes());
  const auto single = linear_cross_entropy(
      rows[1][3], one.weight.detach(), targets[1][3], options);
  EXPECT_EQ(single.dim(), 0);
  EXPECT_LE(difference(single, by_token[1][3]), 1e-14);
}

TEST(LinearCrossEntropyTest, NoTokensGiveNaNAndGradientsOfZero) {
  Case one = make_case();
  one.hidden = one.hidden.detach().narrow(0, 0, 0).requires_grad_();
  one.targets = one.targets.narrow(0, 0, 0);
  const auto loss = linear_cross_entropy(one.hidden, one.weight, one.targets);
  EXPECT_TRUE(loss.isnan().item<bool>());
  EXPECT_EQ(gradients(loss, one)[1].abs().max().item<double>(), 0);
}

TEST(LinearCrossEntropyTest, WithoutGradModeThereIsNoGraph) {
  const Case one = make_case();
  torch::NoGradGuard no_grad;
  const auto loss = linear_cross_entropy(one.hidden, one.weight, one.targets);
  EXPECT_FALSE(loss.requires_grad());
  EXPECT_LE(difference(loss, composed(one)), 1e-14);
}

TEST(LinearCrossEntropyTest, OnlyWhatRequiresAGradientGetsOne) {
  const Case one = make_case();
  const Case frozen{one.hidden, one.weight.detach(), one.targets};
  linear_cross_entropy(frozen.hidden, frozen.weight, frozen.targets).backward();
  EXPECT_TRUE(one.hidden.grad().defined());
  const auto features = one.hidden.detach();
  linear_cross_entropy(features, one.weight, one.targets).backward();
  EXPECT_LE(
      difference(one.weight.grad(), gradients(composed(one), one)[1]), 1e-15);
}

TEST(LinearCrossEntropyTest, RetainedGraphGivesTheSameGradientsAgain) {
  const Case one = make_case();
  for (const bool by_token : {false, true}) {
    auto options = in_chunks(5);
    if (by_token) {
      options.reduction(torch::kNone);
    }
    const auto loss =
        linear_cross_entropy(one.hidden, one.weight, one.targets, options)
            .sum();
    const auto first = gradients(loss, one, /*retain_graph=*/true);
    const auto again = gradients(loss, one, /*retain_graph=*/true);
    const auto last = gradients(loss, one);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(torch::equal(first[i], again[i]));
      EXPECT_TRUE(torch::equal(first[i], last[i]));
    }
  }
}

TEST(LinearCrossEntropyTest, ASecondBackwardIsRefused) {
  const Case one = make_case();
  const auto loss = linear_cross_entropy(one.hidden, one.weight, one.targets);
  loss.backward();
  EXPECT_THAT(
      testing::error_of([&] { loss.backward(); }),
      HasSubstr("retain_graph=true"));
}

TEST(LinearCrossEntropyTest, DoubleBackwardIsRefused) {
  const Case one = make_case();
  for (const bool by_token : {false, true}) {
    LinearCrossEntropyOptions options;
    if (by_token) {
      options.reduction(torch::kNone);
    }
    const auto loss =
        linear_cross_entropy(one.hidden, one.weight, one.targets, options);
    EXPECT_THAT(
        testing::error_of([&] {
          torch::autograd::grad(
              {loss.sum()},
              {one.hidden},
              {},
              /*retain_graph=*/true,
              /*create_graph=*/true);
        }),
        HasSubstr("[linear_cross_entropy] a backward with create_graph=true"));
  }
}

TEST(LinearCrossEntropyTest, BFloat16IsAsGoodAsFloat32Logits) {
  const Case low = make_case(at::kBFloat16);
  const auto reference = composed(
      {low.hidden.to(at::kDouble), low.weight.to(at::kDouble), low.targets});
  const auto loss =
      linear_cross_entropy(low.hidden, low.weight, low.targets, in_chunks(4));
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_LE(difference(loss, reference), 1e-6);
  const auto ours = gradients(loss, low);
  const auto theirs = gradients(reference, low);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(ours[i].scalar_type(), at::kBFloat16);
    // Rounded once: half of the last of 8 bits.
    EXPECT_LE(
        difference(ours[i], theirs[i]),
        0x1p-8 * theirs[i].abs().max().item<double>());
  }
}

/// The gradients of an unscaled loss are below what float16 can hold.
TEST(LinearCrossEntropyTest, ScaledLossKeepsGradientsFromVanishingInFloat16) {
  constexpr double kScale = 65536;
  const Case one = make_case(at::kHalf);
  const auto tiny = LinearCrossEntropyOptions()
                        .weight(torch::full({kClasses}, 1e-6, torch::kFloat))
                        .reduction(torch::kSum);
  const auto loss =
      linear_cross_entropy(one.hidden, one.weight, one.targets, tiny);
  const auto ours = gradients(loss * kScale, one);
  const auto exact = gradients(
      composed(
          {one.hidden.to(at::kDouble),
           one.weight.to(at::kDouble),
           one.targets}) *
          static_cast<double>(kTokens) * 1e-6 * kScale,
      one);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_LE(
        difference(ours[i], exact[i]),
        2e-3 * exact[i].abs().max().item<double>());
  }
}

/// As on a GPU, where products are in float16: of 65,536 tokens each counts for
/// so little that its part of the mean is nothing in float16.
TEST(ChunkedLossTest, AMeanOverManyTokensDoesNotVanishInFloat16Products) {
  constexpr int64_t kMany = 65536;
  torch::manual_seed(2);
  const at::NoGradGuard no_grad;
  nn::LossInputs inputs{
      .hidden = torch::randn({kMany, kWidth}).to(at::kHalf),
      .weight = torch::randn({kClasses, kWidth}).to(at::kHalf),
      .targets = torch::randint(0, kClasses, {kMany}, torch::kLong),
      .chunk = 256,
      .dtypes = {at::kHalf, at::kFloat}};
  const nn::WantedGradients wanted{.hidden = true, .weight = true};
  const auto ours = nn::chunked_loss(inputs, wanted);
  inputs.hidden = inputs.hidden.to(at::kDouble);
  inputs.weight = inputs.weight.to(at::kDouble);
  inputs.dtypes = {at::kDouble, at::kDouble};
  const auto exact = nn::chunked_loss(inputs, wanted);
  EXPECT_LE(
      difference(ours.hidden, exact.hidden),
      5e-3 * exact.hidden.abs().max().item<double>());
  EXPECT_LE(
      difference(ours.weight, exact.weight),
      5e-3 * exact.weight.abs().max().item<double>());

  inputs.dtypes = {at::kHalf, at::kFloat};
  inputs.targets = torch::full({kMany}, -100, torch::kLong);
  EXPECT_EQ(
      nn::chunked_loss(inputs, wanted).weight.abs().max().item<double>(), 0);
}

TEST(LinearCrossEntropyTest, AutocastTakesFloat32AndLeavesDouble) {
  const Case one = make_case(at::kFloat);
  const Case wide = make_case();
  const auto expected = composed(one);
  const auto theirs = gradients(expected, one);
  const Autocast autocast(at::kBFloat16);
  const Case mixed{one.hidden.to(at::kBFloat16), one.weight, one.targets};
  const auto loss =
      linear_cross_entropy(mixed.hidden, mixed.weight, mixed.targets);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_LE(difference(loss, expected), 2e-2);
  const auto ours = gradients(loss, one);
  EXPECT_EQ(ours[1].scalar_type(), at::kFloat);
  EXPECT_LE(difference(ours[1], theirs[1]), 2e-2);
  const auto exact =
      linear_cross_entropy(wide.hidden, wide.weight, wide.targets);
  EXPECT_EQ(exact.scalar_type(), at::kDouble);
}

TEST(LinearCrossEntropyTest, SaysWhatDoesNotFit) {
  const Case one = make_case();
  const auto error = [&](const at::Tensor& hidden,
                         const at::Tensor& weight,
                         const at::Tensor& targets,
                         const LinearCrossEntropyOptions& options = {}) {
    return testing::error_of(
        [&] { linear_cross_entropy(hidden, weight, targets, options); });
  };
  EXPECT_THAT(
      error(one.hidden, one.weight.t(), one.targets),
      HasSubstr("weight has the shape [7, 23]; expected (classes, 7)"));
  EXPECT_THAT(
      error(one.hidden, one.weight, one.targets.narrow(0, 0, 3)),
      HasSubstr("targets have the shape [3]"));
  EXPECT_THAT(
      error(one.hidden, one.weight, one.targets.to(torch::kInt)),
      HasSubstr("targets are of Int; expected int64"));
  EXPECT_THAT(
      error(one.hidden, one.weight, torch::rand({kTokens, kClasses})),
      HasSubstr("probabilities of classes are not supported"));
  EXPECT_THAT(
      error(one.hidden, one.weight.to(torch::kFloat), one.targets),
      HasSubstr("hidden is of Double and weight of Float"));
  EXPECT_THAT(
      error(one.hidden, one.weight, one.targets + 10),
      HasSubstr("and there are 23 classes, counted from 0"));
  EXPECT_THAT(
      error(
          one.hidden,
          one.weight,
          one.targets,
          LinearCrossEntropyOptions().label_smoothing(1.5)),
      HasSubstr("label_smoothing is 1.5"));
  EXPECT_THAT(
      error(
          one.hidden,
          one.weight,
          one.targets,
          LinearCrossEntropyOptions().batch_chunk_size(0)),
      HasSubstr("batch_chunk_size is 0"));
  EXPECT_THAT(
      error(
          one.hidden,
          one.weight,
          one.targets,
          LinearCrossEntropyOptions().linear_bias(torch::zeros({4}))),
      HasSubstr("linear_bias has the shape [4]; expected (23)"));
}

} // namespace
} // namespace tessera
