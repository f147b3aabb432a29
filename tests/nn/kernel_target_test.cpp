// Which code NVRTC is asked for.
#include "libtorch/kernel_target.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::libtorch {
namespace {

std::string target_of(int architecture, const std::vector<int>& supported) {
  return kernel_target(architecture, supported).text();
}

TEST(KernelTargetTest, IsTheGpuThatNvrtcKnows) {
  EXPECT_EQ(target_of(90, {75, 80, 90, 100}), "sm_90");
  EXPECT_EQ(target_of(75, {75}), "sm_75");
}

TEST(KernelTargetTest, IsPtxOfTheNewestOlderOneForAGpuThatNvrtcDoesNotKnow) {
  EXPECT_EQ(target_of(110, {75, 120, 100, 90}), "compute_100");
  EXPECT_EQ(target_of(130, {75, 120, 100, 90}), "compute_120");
}

TEST(KernelTargetTest, IsRefusedByNvrtcForAGpuOlderThanAll) {
  EXPECT_EQ(target_of(50, {75, 80}), "sm_50");
  EXPECT_EQ(target_of(90, {}), "sm_90");
}

} // namespace
} // namespace tessera::libtorch
