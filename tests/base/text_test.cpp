#include "base/text.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(TextTest, CountsHaveThousandsAndPlurals) {
  EXPECT_EQ(count_text(999), "999");
  EXPECT_EQ(count_text(1234567), "1,234,567");
  EXPECT_EQ(count_text(1, "step"), "1 step");
  EXPECT_EQ(count_text(2000, "step"), "2,000 steps");
}

TEST(TextTest, BytesTakeTheNextUnitBeforeTheyShowFourDigits) {
  EXPECT_EQ(bytes_text(1), "1 byte");
  EXPECT_EQ(bytes_text(999), "999 bytes");
  EXPECT_EQ(bytes_text(1000), "1.0 kB");
  EXPECT_EQ(bytes_text(999'949), "999.9 kB");
  EXPECT_EQ(bytes_text(999'960), "1.0 MB");
  EXPECT_EQ(bytes_text(1.25e15), "1.2 PB");
}

} // namespace
} // namespace tessera
