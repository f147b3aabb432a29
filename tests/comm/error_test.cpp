#include <tessera/error.h>
#include <tessera/version.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(ErrorTest, SaysCallPlaceAndWhat) {
  EXPECT_EQ(
      format_error(
          {.call = "fully_shard",
           .rank = 2,
           .world_size = 8,
           .unit = "layers.7",
           .parameter = "attn.wq.weight"},
          "still on the meta device."),
      "[fully_shard] rank 2/8, unit \"layers.7\", parameter "
      "\"attn.wq.weight\": still on the meta device.");
}

TEST(ErrorTest, LeavesOutWhatIsNotKnown) {
  EXPECT_EQ(format_error({.call = "load"}, "no."), "[load] no.");
  EXPECT_EQ(
      format_error({.call = "load", .path = "a/b"}, "no."),
      "[load] \"a/b\": no.");
}

TEST(ErrorTest, WhatIsTheMessageAlone) {
  try {
    raise<c10::ValueError>({.call = "x"}, "y.");
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(error.what(), "[x] y.");
  }
}

TEST(ErrorTest, AnInternalAssertAsksForAReport) {
  try {
    TESSERA_INTERNAL_ASSERT(1 + 1 == 3, "sums are off");
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("1 + 1 == 3"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("error_test.cpp"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("bug in Tessera"));
  }
}

TEST(VersionTest, IsThatOfTheHeaders) {
  EXPECT_STREQ(version(), TESSERA_VERSION_STRING);
  EXPECT_THAT(libtorch_version(), ::testing::StartsWith("2."));
}

} // namespace
} // namespace tessera
