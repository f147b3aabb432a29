// What a build without CUDA's headers says on a GPU: part of nn_test there.
#include <c10/util/Exception.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "nn/cross_entropy_kernel.h"

namespace tessera::nn {
namespace {

class HeardWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;
};

TEST(CrossEntropyWithoutCudaTest, OneWarningSaysThatTheKernelIsMissing) {
  HeardWarnings heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kFloat}) {
    for (const at::DeviceIndex device : {0, 1}) {
      EXPECT_EQ(cross_entropy_kernel({at::kCUDA, device}, dtype), nullptr);
    }
  }
  EXPECT_EQ(cross_entropy_kernel(at::kCPU, at::kFloat), nullptr);
  EXPECT_THAT(
      heard.texts,
      ::testing::ElementsAre(::testing::AllOf(
          ::testing::HasSubstr("uses LibTorch's operators"),
          ::testing::HasSubstr("built without CUDA's headers"))));
}

} // namespace
} // namespace tessera::nn
