// The kernel of linear_cross_entropy, compiled as on a GPU. Needs no GPU, but a
// LibTorch with CUDA: part of nn_test where the kernel is built.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "libtorch/cuda_kernel.h"
#include "nn/cross_entropy_kernel.h"

namespace tessera::nn {
namespace {

constexpr auto kDtypes = {at::kFloat, at::kBFloat16};

TEST(NvrtcTest, CompilesTheKernelForEachArchitecture) {
  const std::vector<int> known = libtorch::nvrtc_architectures();
  ASSERT_FALSE(known.empty());
  for (const int architecture : known) {
    const auto target = libtorch::kernel_target(architecture, known);
    for (const auto dtype : kDtypes) {
      const std::string code = compile_cross_entropy(target, dtype);
      EXPECT_EQ(code.substr(1, 3), "ELF") << architecture;
      EXPECT_NE(code.find("cross_entropy"), std::string::npos) << architecture;
    }
  }
}

TEST(NvrtcTest, MakesPtxForAGpuThatItDoesNotKnow) {
  const std::vector<int> known = libtorch::nvrtc_architectures();
  const int newest = *std::max_element(known.begin(), known.end());
  const auto target = libtorch::kernel_target(newest + 10, known);
  for (const auto dtype : kDtypes) {
    const std::string code = compile_cross_entropy(target, dtype);
    EXPECT_NE(
        code.find(".target sm_" + std::to_string(newest)), std::string::npos);
    EXPECT_NE(code.find(".entry cross_entropy"), std::string::npos);
    EXPECT_EQ(code.find(".local"), std::string::npos); // all in registers
  }
}

TEST(NvrtcTest, SaysWhatItRefuses) {
  EXPECT_THROW(
      compile_cross_entropy({.architecture = 1}, at::kFloat), c10::Error);
}

} // namespace
} // namespace tessera::nn
