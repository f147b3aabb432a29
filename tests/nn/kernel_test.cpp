// The kernel of linear_cross_entropy, run on the host, against operators.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/nn/linear_cross_entropy.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "nn/chunked_loss.h"
#include "nn/cross_entropy_kernel.h"
#include "nn/cuda_on_host.h"
#include "support/ranks.h"

#define THREADS 8
namespace tessera::testing::cuda::in_float {
#define BFLOAT16 0
#include "nn/cross_entropy.cu"
#undef BFLOAT16
} // namespace tessera::testing::cuda::in_float
namespace tessera::testing::cuda::in_bfloat16 {
#define BFLOAT16 1
#include "nn/cross_entropy.cu"
#undef BFLOAT16
} // namespace tessera::testing::cuda::in_bfloat16

namespace tessera::nn {
namespace {

using testing::cuda::launch;

class HostKernel : public CrossEntropyKernel {
 public:
  void run(const LogitsChunk& chunk) const override {
    ++runs;
    const auto start = reinterpret_cast<uintptr_t>(chunk.logits.data_ptr());
    const auto row = static_cast<int64_t>(chunk.logits.element_size()) *
        chunk.logits.stride(0);
    EXPECT_EQ(start % kRowAlignment, 0U);
    EXPECT_EQ(row % kRowAlignment, 0);
    launch(static_cast<int>(chunk.logits.size(0)), THREADS, [&] {
      if (chunk.logits.scalar_type() == at::kFloat) {
        call(&testing::cuda::in_float::cross_entropy, chunk);
      } else {
        call(&testing::cuda::in_bfloat16::cross_entropy, chunk);
      }
    });
  }
  mutable int runs = 0;

 private:
  template <class Logit>
  static void call(
      void (*kernel)(
          Logit*,
          long long,
          int,
          const float*,
          const float*,
          const long long*,
          const float*,
          const float*,
          float*,
          const float*,
          const float*,
          const float*),
      const LogitsChunk& chunk) {
    const auto floats = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
    };
    kernel(
        static_cast<Logit*>(chunk.logits.data_ptr()),
        chunk.logits.stride(0),
        static_cast<int>(chunk.logits.size(1)),
        floats(chunk.bias),
        floats(chunk.class_weight),
        static_cast<const long long*>(chunk.targets.const_data_ptr()),
        floats(chunk.loss.at_target),
        floats(chunk.loss.even),
        chunk.losses.defined() ? chunk.losses.data_ptr<float>() : nullptr,
        floats(chunk.gradient.at_target),
        floats(chunk.gradient.even),
        floats(chunk.gradient.of_softmax));
  }
};

/// While it lives, losses on the CPU use the kernel.
class KernelOnHost {
 public:
  KernelOnHost() {
    set_cross_entropy_kernel_for_tests(
        [this](at::Device, at::ScalarType) { return &kernel; });
  }
  ~KernelOnHost() {
    set_cross_entropy_kernel_for_tests({});
  }
  KernelOnHost(const KernelOnHost&) = delete;
  KernelOnHost& operator=(const KernelOnHost&) = delete;

  HostKernel kernel;
};

struct Case {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  int64_t classes = 23;
  bool has_bias = false;
  bool has_class_weight = false;
  double smoothing = 0;
  int64_t reduction = at::Reduction::Mean;
  int64_t chunk = 4;
  double scale = 1; // of the logits
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.name;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const std::string prefix = dtype == at::kFloat ? "Float" : "BFloat16";
    all.push_back({prefix + "Plain", dtype});
    all.push_back({prefix + "ManyClasses", dtype, 1003});
    all.push_back({prefix + "OneClass", dtype, 1});
    all.push_back({prefix + "Bias", dtype, 24, true});
    all.push_back({prefix + "ClassWeight", dtype, 25, false, true});
    all.push_back({prefix + "Smoothing", dtype, 26, false, false, 0.1});
    all.push_back({prefix + "All", dtype, 301, true, true, 0.2});
    all.push_back(
        {prefix + "Sum", dtype, 40, true, false, 0, at::Reduction::Sum});
    all.push_back(
        {prefix + "ByToken", dtype, 40, false, true, 0.1, at::Reduction::None});
    all.push_back(
        {prefix + "OneChunk",
         dtype,
         23,
         false,
         false,
         0,
         at::Reduction::Mean,
         100});
    all.push_back(
        {prefix + "LargeLogits",
         dtype,
         37,
         false,
         false,
         0,
         at::Reduction::Mean,
         4,
         200});
  }
  return all;
}

LossInputs inputs_of(const Case& one) {
  constexpr int64_t kTokens = 11;
  constexpr int64_t kWidth = 6;
  torch::manual_seed(2);
  LossInputs inputs{
      .hidden = torch::randn({kTokens, kWidth}).mul(one.scale).to(one.dtype),
      .weight = torch::randn({one.classes, kWidth}).to(one.dtype),
      .bias = one.has_bias ? torch::randn({one.classes}) : at::Tensor(),
      .targets = torch::randint(one.classes, {kTokens}, torch::kLong),
      .class_weight =
          one.has_class_weight ? torch::rand({one.classes}) : at::Tensor(),
      .reduction = one.reduction,
      .ignore_index = -100,
      .label_smoothing = one.smoothing,
      .chunk = one.chunk,
      .dtypes = {.product = one.dtype, .sum = at::kFloat}};
  inputs.targets[3] = -100; // one token that is ignored
  return inputs;
}

void expect_near(
    const at::Tensor& ours,
    const at::Tensor& theirs,
    double tolerance,
    const char* what) {
  const double largest = theirs.to(at::kDouble).abs().max().item<double>();
  EXPECT_LE(
      (ours.to(at::kDouble) - theirs.to(at::kDouble))
          .abs()
          .max()
          .item<double>(),
      tolerance * std::max(largest, 1e-3))
      << what;
}

class KernelTest : public ::testing::TestWithParam<Case> {};

TEST_P(KernelTest, GivesTheLossAndTheGradientsOfOperators) {
  const LossInputs inputs = inputs_of(GetParam());
  const bool by_token = inputs.reduction == at::Reduction::None;
  const WantedGradients all{
      .hidden = true, .weight = true, .bias = inputs.bias.defined()};
  const auto upstream = torch::linspace(-1, 1, inputs.tokens());
  const auto run = [&] {
    LossAndGradients result = by_token
        ? chunked_gradients(inputs, all, upstream)
        : chunked_loss(inputs, all);
    if (by_token) {
      result.loss = chunked_loss(inputs, {}).loss;
    }
    return result;
  };
  const LossAndGradients theirs = run();
  const KernelOnHost on_host;
  const LossAndGradients ours = run();
  const auto loss_alone = chunked_loss(inputs, {}).loss;

  EXPECT_GT(on_host.kernel.runs, 0);
  const double tolerance =
      GetParam().dtype == at::kFloat ? 5e-6 : 1e-2; // bfloat16 has 8 bits
  expect_near(ours.loss, theirs.loss, tolerance, "loss");
  EXPECT_TRUE(torch::equal(loss_alone, ours.loss));
  expect_near(ours.hidden, theirs.hidden, tolerance, "hidden");
  expect_near(ours.weight, theirs.weight, tolerance, "weight");
  if (all.bias) {
    expect_near(ours.bias, theirs.bias, tolerance, "bias");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    KernelTest,
    ::testing::ValuesIn(cases()),
    [](const auto& test) { return test.param.name; });

/// What is not a number is not hidden, and rows do not touch each other.
TEST(KernelTest, NotANumberStaysInItsRow) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Case one{.name = "", .dtype = dtype};
    LossInputs inputs = inputs_of(one);
    inputs.hidden[5][0] = std::numeric_limits<float>::quiet_NaN();
    inputs.reduction = at::Reduction::None;
    const KernelOnHost on_host;
    const auto losses = chunked_loss(inputs, {}).loss;
    const auto upstream = torch::ones({inputs.tokens()});
    const auto hidden =
        chunked_gradients(inputs, {.hidden = true}, upstream).hidden;
    for (int64_t i = 0; i < inputs.tokens(); ++i) {
      EXPECT_EQ(losses[i].isnan().item<bool>(), i == 5) << i;
      EXPECT_EQ(hidden[i].isnan().any().item<bool>(), i == 5) << i;
    }
    EXPECT_EQ(losses[3].item<float>(), 0); // ignored
  }
}

/// As the operators do: a row without a finite logit has no loss.
TEST(KernelTest, InfiniteLogitsGiveWhatOperatorsGive) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    LossInputs inputs = inputs_of({.name = "", .dtype = dtype});
    inputs.bias = torch::zeros({inputs.classes()});
    inputs.reduction = at::Reduction::None;
    for (const float value : {kInfinity, -kInfinity}) {
      for (const bool everywhere : {false, true}) {
        inputs.bias.fill_(everywhere ? value : 0);
        inputs.bias[2] = value;
        const auto upstream = torch::ones({inputs.tokens()});
        const auto run = [&] {
          return std::pair(
              chunked_loss(inputs, {}).loss,
              chunked_gradients(inputs, {.hidden = true}, upstream).hidden);
        };
        const auto theirs = run();
        const KernelOnHost on_host;
        const auto ours = run();
        EXPECT_TRUE(torch::allclose(
            ours.first, theirs.first, 1e-2, 1e-2, /*equal_nan=*/true))
            << value << '\n'
            << ours.first << theirs.first;
        EXPECT_TRUE(torch::allclose(
            ours.second, theirs.second, 1e-2, 1e-2, /*equal_nan=*/true))
            << value << '\n'
            << ours.second << theirs.second;
      }
    }
  }
}

/// The weight's unit takes the place of the bias's, which was gathered first.
TEST(KernelTest, ReadsABiasOfAnotherUnit) {
  testing::on_ranks(2, [](const Group&) {
    torch::manual_seed(3);
    torch::nn::Embedding embed(32, 8);
    torch::nn::Linear head(1, 32); // for its bias
    torch::nn::Sequential model(embed, head);
    const auto ids = torch::arange(10);
    const auto loss = [&] {
      return linear_cross_entropy(
          embed(ids),
          embed->weight,
          ids,
          LinearCrossEntropyOptions().linear_bias(head->bias));
    };
    const auto expected = loss();
    fully_shard(embed);
    fully_shard(head);
    fully_shard(model);
    const KernelOnHost on_host;
    EXPECT_TRUE(torch::allclose(loss(), expected));
    EXPECT_GT(on_host.kernel.runs, 0);
  });
}

TEST(KernelTest, ABiasOnAnotherDeviceIsRefused) {
  const auto options =
      LinearCrossEntropyOptions().linear_bias(torch::zeros({5}, torch::kMeta));
  EXPECT_THROW(
      linear_cross_entropy(
          torch::zeros({2, 3}),
          torch::zeros({5, 3}),
          torch::zeros({2}, torch::kLong),
          options),
      c10::ValueError);
}

TEST(KernelTest, RoundsToTheNearestBfloat16) {
  using testing::cuda::in_bfloat16::from_float;
  torch::manual_seed(4);
  auto values = torch::randn({5000}).mul(torch::randn({5000}).exp());
  values[0] = std::numeric_limits<float>::infinity();
  values[1] = -std::numeric_limits<float>::infinity();
  values[2] = 1.00390625; // between two: to the even one
  values[3] = 1.01171875;
  values[4] = 0.0;
  const auto expected = values.to(at::kBFloat16);
  for (int64_t i = 0; i < values.numel(); ++i) {
    EXPECT_EQ(
        from_float(values[i].item<float>()),
        expected[i].item<at::BFloat16>().x);
  }
}

} // namespace
} // namespace tessera::nn
