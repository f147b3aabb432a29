#include "checkpoint/disk/box_tiling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::checkpoint {
namespace {

using ::testing::HasSubstr;

StoredBox box(std::vector<int64_t> offsets, std::vector<int64_t> sizes) {
  return {{.offsets = std::move(offsets), .sizes = std::move(sizes)}};
}

TEST(CoverTest, AcceptsBoxesThatTile) {
  EXPECT_EQ(why_not_covered({}, {box({}, {})}), "");
  EXPECT_EQ(why_not_covered({0, 3}, {}), "");
  EXPECT_EQ(why_not_covered({4}, {box({2}, {2}), box({0}, {2})}), "");
  EXPECT_EQ(
      why_not_covered({2, 2}, {box({0, 0}, {2, 1}), box({0, 1}, {2, 1})}), "");
}

// Five boxes around each other: no straight cut divides them.
TEST(CoverTest, AcceptsAPinwheel) {
  EXPECT_EQ(
      why_not_covered(
          {3, 3},
          {box({0, 0}, {1, 2}),
           box({0, 2}, {2, 1}),
           box({2, 1}, {1, 2}),
           box({1, 0}, {2, 1}),
           box({1, 1}, {1, 1})}),
      "");
}

TEST(CoverTest, RejectsGaps) {
  EXPECT_THAT(
      why_not_covered({4}, {box({0}, {3})}),
      HasSubstr("1 of its 4 elements are missing"));
  EXPECT_THAT(why_not_covered({}, {}), HasSubstr("1 of its 1"));
}

TEST(CoverTest, RejectsOverlapOfTheRightVolume) {
  // The element 1 twice, the element 3 never.
  EXPECT_THAT(
      why_not_covered({4}, {box({0}, {2}), box({1}, {2})}),
      HasSubstr("overlap"));
  EXPECT_THAT(
      why_not_covered({2, 2}, {box({0, 0}, {1, 2}), box({0, 0}, {2, 1})}),
      HasSubstr("overlap"));
  EXPECT_THAT(
      why_not_covered({4}, {box({0}, {4}), box({0}, {4})}),
      HasSubstr("overlap"));
}

TEST(CoverTest, TakesManyBoxesWithoutComparingAllPairs) {
  std::vector<StoredBox> boxes;
  constexpr int64_t kMany = 1000;
  for (int64_t i = 0; i < kMany; ++i) {
    for (int64_t j = 0; j < kMany; ++j) {
      boxes.push_back(box({i * 2, j}, {2, 1}));
    }
  }
  // A million boxes: this takes seconds, all pairs would take hours.
  EXPECT_EQ(why_not_covered({2 * kMany, kMany}, boxes), "");
  std::swap(boxes[7].offsets[0], boxes[7].offsets[1]);
  EXPECT_THAT(why_not_covered({2 * kMany, kMany}, boxes), HasSubstr("overlap"));
}

} // namespace
} // namespace tessera::checkpoint
