#include "report/decimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace tessera::report {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<double> noise(size_t count) {
  std::mt19937 random(3);
  std::vector<double> values(count);
  for (double& value : values) {
    value = static_cast<double>(random());
  }
  return values;
}

TEST(DecimateTest, WhatFitsStaysWhole) {
  EXPECT_THAT(decimate(std::vector<double>{}, 8), IsEmpty());
  EXPECT_THAT(decimate(std::vector<double>{3, 1, 2}, 8), ElementsAre(0, 1, 2));
  EXPECT_THAT(decimate(noise(100), 100), SizeIs(100));
}

TEST(DecimateTest, ManyBecomeAFewThatAscend) {
  for (const size_t count : {101, 1000, 99999}) {
    const auto chosen = decimate(noise(count), 100);
    EXPECT_LE(chosen.size(), 100U);
    EXPECT_GE(chosen.size(), 60U);
    EXPECT_EQ(chosen.front(), 0U);
    EXPECT_EQ(chosen.back(), count - 1);
    EXPECT_EQ(
        std::adjacent_find(chosen.begin(), chosen.end(), std::greater_equal()),
        chosen.end());
  }
}

TEST(DecimateTest, ExtremesOfEveryStretchStay) {
  const auto values = noise(10000);
  const auto chosen = decimate(values, 302); // 100 stretches of 100
  for (size_t begin = 0; begin < values.size(); begin += 100) {
    const auto [least, greatest] = std::minmax_element(
        values.begin() + begin, values.begin() + begin + 100);
    EXPECT_THAT(chosen, Contains(least - values.begin()));
    EXPECT_THAT(chosen, Contains(greatest - values.begin()));
  }
}

TEST(DecimateTest, ASingleNanAmongAMillionStays) {
  std::vector<double> values(1000000, 1.0);
  values[777777] = kNan;
  EXPECT_THAT(decimate(values, 100), Contains(777777U));
  EXPECT_THAT(decimate(std::vector<double>(1000, kNan), 100), Contains(999U));
}

TEST(MeansTest, AreOfWhatIsFinite) {
  const std::vector<double> values{1, 3, kNan, 5, kNan, kNan};
  const auto found = means(values, 3);
  ASSERT_THAT(found, SizeIs(3));
  EXPECT_EQ(found[0].value, 2);
  EXPECT_EQ(found[0].middle, 1U);
  EXPECT_EQ(found[0].count, 2U);
  EXPECT_EQ(found[1].value, 5);
  EXPECT_EQ(found[1].count, 1U);
  EXPECT_TRUE(std::isnan(found[2].value)); // a gap
  EXPECT_EQ(found[2].count, 0U);
}

TEST(MeansTest, DoNotOverflow) {
  const std::vector<double> values(10, std::numeric_limits<double>::max());
  EXPECT_TRUE(std::isfinite(means(values, 1)[0].value));
}

} // namespace
} // namespace tessera::report
