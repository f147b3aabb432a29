// The kernel of linear_cross_entropy, compiled as on a GPU. Needs no GPU, but a
// LibTorch with CUDA: part of nn_test where the kernel is built.
#include <gtest/gtest.h>

#include <string>

#include "nn/cross_entropy_kernel.h"

namespace tessera::nn {
namespace {

TEST(NvrtcTest, CompilesTheKernel) {
  for (const char* sm : {"sm_75", "sm_80", "sm_90", "sm_100"}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const std::string code = compile_cross_entropy(sm, dtype);
      EXPECT_EQ(code.substr(1, 3), "ELF") << sm;
      EXPECT_NE(code.find("cross_entropy"), std::string::npos) << sm;
    }
  }
}

TEST(NvrtcTest, SaysWhatItRefuses) {
  EXPECT_THROW(compile_cross_entropy("sm_1", at::kFloat), c10::Error);
}

} // namespace
} // namespace tessera::nn
