// Mixed precision, autocast and scaled gradients under FSDP.
#include <tessera/fsdp/fsdp.h>

#include <ATen/autocast_mode.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests

TEST(FsdpTest, MixedPrecisionComputesLowAndKeepsHigh) {
  on_ranks(2, [](const Group& world) {
    torch::manual_seed(1);
    torch::nn::Linear linear(8, 8);
    torch::nn::Sequential module(
        linear,
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
        torch::nn::Linear(8, 2));
    module->register_buffer("scale", torch::ones({2}));
    const FSDP model(
        module,
        FSDPOptions().use_orig_params(true).mixed_precision(
            MixedPrecision()
                .param_dtype(at::kBFloat16)
                .reduce_dtype(at::kFloat)
                .buffer_dtype(at::kBFloat16)));
    auto x = torch::ones({3, 8}, at::requires_grad());
    // The handle casts its input, the plain forward casts each operand of
    // another dtype.
    EXPECT_EQ(model(x).scalar_type(), at::kBFloat16);
    const auto output = module->forward(x);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    EXPECT_EQ(linear->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(model->named_buffers()["scale"].scalar_type(), at::kBFloat16);
    output.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
    for (const auto& leaf : parameters(*model)) {
      EXPECT_EQ(leaf.scalar_type(), at::kFloat);
      if (leaf.grad().defined()) {
        EXPECT_EQ(leaf.grad().scalar_type(), at::kFloat);
      }
    }
    EXPECT_EQ(world.size(), 2);
  });
}

TEST(FsdpTest, MixedPrecisionTakesRecurrentAndConvolutionalInputs) {
  on_ranks(2, [](const Group&) {
    struct Net : torch::nn::Module {
      torch::nn::Conv1d conv =
          register_module("conv", torch::nn::Conv1d(3, 4, 1));
      torch::nn::BatchNorm1d norm =
          register_module("norm", torch::nn::BatchNorm1d(4));
      torch::nn::LSTM lstm = register_module("lstm", torch::nn::LSTM(4, 5));
      at::Tensor forward(const at::Tensor& x) {
        const auto y = norm(conv(x)).permute({2, 0, 1});
        return std::get<0>(lstm(y));
      }
    };
    auto net = std::make_shared<Net>();
    fully_shard(
        *net,
        FullyShardOptions().mp_policy(
            MixedPrecisionPolicy().param_dtype(at::kBFloat16)));
    const auto output = net->forward(torch::ones({2, 3, 6}));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    // Statistics are buffers and keep their precision.
    EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_NE(net->norm->running_var.sum().item<double>(), 4);
  });
}

TEST(FsdpTest, MixedPrecisionHasTheGradientsOfTheLowDtype) {
  on_ranks(2, [](const Group& world) {
    torch::manual_seed(1);
    torch::nn::Linear plain(8, 8);
    torch::manual_seed(1);
    torch::nn::Linear linear(8, 8);
    fully_shard(
        *linear,
        FullyShardOptions().mp_policy(MixedPrecisionPolicy()
                                          .param_dtype(at::kBFloat16)
                                          .reduce_dtype(at::kFloat)));
    plain->to(at::kBFloat16);
    torch::manual_seed(2);
    const auto x = torch::randn({4, 8}, at::kBFloat16);
    plain->forward(x).square().sum().backward();
    linear->forward(x).square().sum().backward();
    const auto guard =
        summon_full_params(*linear, SummonOptions().with_grads(true));
    // Equal data: the average of equal bfloat16 values, in float.
    EXPECT_TRUE(torch::equal(
        linear->weight.grad(), plain->weight.grad().to(at::kFloat)));
    EXPECT_EQ(world.size(), 2);
  });
}

TEST(FsdpTest, AutocastAndScaledGradientsMatchThePlainModel) {
  on_ranks(2, [](const Group& world) {
    torch::manual_seed(5);
    Stack plain(kVocabulary, kWidth, kDepth);
    torch::manual_seed(5);
    Stack module(kVocabulary, kWidth, kDepth);
    shard_blocks(module);
    constexpr double kScale = 1024;
    const auto loss = [&](Stack& model) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      auto value = model->forward(tokens(0, 1)).to(at::kFloat).square().mean();
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      return value;
    };
    auto expected = loss(plain);
    auto actual = loss(module);
    EXPECT_EQ(actual.item<double>(), expected.item<double>());
    (expected * kScale).backward();
    (actual * kScale).backward();
    for (const auto& leaf : parameters(*module)) {
      if (leaf.grad().defined()) {
        leaf.mutable_grad().div_(kScale); // unscale, as a GradScaler does
      }
    }
    for (const auto& parameter : plain->parameters()) {
      parameter.mutable_grad().div_(kScale);
    }
    auto guard = summon_full_params(*module, SummonOptions().with_grads(true));
    const auto theirs = plain->named_parameters();
    for (const auto& [name, parameter] : named_parameters(*module)) {
      EXPECT_TRUE(
          torch::allclose(parameter.grad(), theirs[name].grad(), 1e-5, 1e-7))
          << name;
    }
    guard.close();
    EXPECT_EQ(world.size(), 2);
  });
}

} // namespace
} // namespace tessera
