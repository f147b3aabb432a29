// The kernel of linear_cross_entropy on a GPU, against operators.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "nn/chunked_loss.h"
#include "nn/cross_entropy_kernel.h"

namespace tessera::nn {
namespace {

const at::Device kGpu{at::kCUDA, 0};

/// While it lives, losses use operators.
class WithoutKernel {
 public:
  WithoutKernel() {
    set_cross_entropy_kernel_for_tests(
        [](at::Device, at::ScalarType) { return nullptr; });
  }
  ~WithoutKernel() {
    set_cross_entropy_kernel_for_tests({});
  }
  WithoutKernel(const WithoutKernel&) = delete;
  WithoutKernel& operator=(const WithoutKernel&) = delete;
};

/// Dtype, classes, tokens of a chunk.
using KernelCase = std::tuple<at::ScalarType, int64_t, int64_t>;

class CudaKernelTest : public ::testing::TestWithParam<KernelCase> {};

/// Work that takes a while: what does not wait for the stream comes too early.
void keep_busy() {
  const auto matrix = torch::ones({4096, 4096}, kGpu);
  for (int i = 0; i < 10; ++i) {
    matrix.copy_(matrix.mm(matrix).div_(4096));
  }
}

void expect_near_operators(
    const at::Tensor& ours,
    const at::Tensor& theirs,
    double tolerance,
    const char* what) {
  const double largest = theirs.to(at::kDouble).abs().max().item<double>();
  const double apart = (ours.to(at::kDouble) - theirs.to(at::kDouble))
                           .abs()
                           .max()
                           .item<double>();
  EXPECT_LE(apart, tolerance * largest) << what;
}

TEST_P(CudaKernelTest, IsThereAndGivesWhatOperatorsGive) {
  const auto [dtype, classes, chunk] = GetParam();
  ASSERT_NE(cross_entropy_kernel(kGpu, dtype), nullptr);
  constexpr int64_t kWidth = 64;
  const int64_t tokens = chunk == 1 ? 3 : chunk + 100;
  torch::manual_seed(2);
  const LossInputs inputs{
      .hidden = torch::randn({tokens, kWidth}, kGpu).to(dtype),
      .weight = torch::randn({classes, kWidth}, kGpu).div_(8).to(dtype),
      .bias = torch::randn({classes}, kGpu),
      .targets = torch::randint(
          classes, {tokens}, torch::dtype(torch::kLong).device(kGpu)),
      .class_weight = torch::rand({classes}, kGpu),
      .label_smoothing = 0.1,
      .chunk = chunk,
      .dtypes = {.product = dtype, .sum = at::kFloat}};
  const WantedGradients all{.hidden = true, .weight = true, .bias = true};
  LossAndGradients theirs;
  {
    const WithoutKernel without_kernel;
    theirs = chunked_loss(inputs, all);
  }
  torch::cuda::synchronize();

  const c10::impl::VirtualGuardImpl gpu(at::kCUDA);
  const c10::StreamGuard on_a_side_stream(gpu.getStreamFromGlobalPool(kGpu));
  keep_busy();
  const LossAndGradients ours = chunked_loss(inputs, all);
  torch::cuda::synchronize();
  const double tolerance = dtype == at::kFloat ? 1e-4 : 2e-2;
  expect_near_operators(ours.loss, theirs.loss, tolerance / 10, "loss");
  expect_near_operators(ours.hidden, theirs.hidden, tolerance, "hidden");
  expect_near_operators(ours.weight, theirs.weight, tolerance, "weight");
  expect_near_operators(ours.bias, theirs.bias, tolerance, "bias");
}

INSTANTIATE_TEST_SUITE_P(
    All,
    CudaKernelTest,
    ::testing::Combine(
        ::testing::Values(at::kFloat, at::kBFloat16),
        ::testing::Values(50257, 151936),
        ::testing::Values(1, 1024)),
    [](const auto& test) {
      return std::string(toString(std::get<0>(test.param))) + "Classes" +
          std::to_string(std::get<1>(test.param)) + "Chunk" +
          std::to_string(std::get<2>(test.param));
    });

/// Parts of chunks are added to float32 without being rounded to bfloat16.
TEST(CudaLossTest, TheGradientOfTheWeightIsNotRounded) {
  constexpr int64_t kTokens = 257; // half of it has too many bits
  const auto options = torch::dtype(torch::kBFloat16).device(kGpu);
  const LossInputs inputs{
      .hidden = torch::ones({kTokens, 8}, options),
      .weight = torch::zeros({2, 8}, options),
      .targets = torch::zeros({kTokens}, options.dtype(torch::kLong)),
      .reduction = at::Reduction::Sum,
      .chunk = kTokens,
      .dtypes = {.product = at::kBFloat16, .sum = at::kFloat}};
  const auto gradient = chunked_loss(inputs, {.weight = true}).weight;
  EXPECT_EQ(gradient[1][0].item<float>(), 0.5F * kTokens);
}

} // namespace
} // namespace tessera::nn
