#include "transfer/state_census.h"

#include <gtest/gtest.h>

#include <string>

#include "support/ranks.h"

namespace tessera::transfer {
namespace {

using testing::on_ranks;

Bytes bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

TEST(StateCensusTest, EveryRankLearnsWhatOneRankHas) {
  on_ranks(4, [](const Group& world) {
    StateCensus census(3, world.rank());
    if (world.rank() == 2) {
      census.count(0, 5, true, bytes_of("momentum"));
      census.count(2, 7, true, bytes_of("nothing but a step"));
    }
    census.exchange(world);
    EXPECT_EQ(census.find(0).ranks, 1);
    EXPECT_EQ(census.find(0).elements, 5);
    EXPECT_TRUE(census.find(0).counts && census.find(0).is_one);
    EXPECT_EQ(census.description(0), bytes_of("momentum"));
    EXPECT_EQ(census.find(1).ranks, 0);
    EXPECT_FALSE(census.find(1).counts);
    EXPECT_EQ(census.description(2), bytes_of("nothing but a step"));
  });
}

TEST(StateCensusTest, ADescriptionThatManyHaveTravelsOnce) {
  const std::string text(1000, 'x');
  on_ranks(4, [&](const Group& world) {
    StateCensus census(8, world.rank());
    for (size_t param = 0; param < 8; ++param) {
      census.count(param, 10, true, bytes_of(text));
    }
    census.exchange(world);
    for (size_t param = 0; param < 8; ++param) {
      EXPECT_EQ(census.find(param).ranks, 4);
      EXPECT_EQ(census.find(param).elements, 40);
      EXPECT_EQ(census.description(param), bytes_of(text));
    }
    EXPECT_EQ(census.wire_bytes(), 8 * 6 * sizeof(int64_t) + text.size());
  });
}

TEST(StateCensusTest, DifferentDescriptionsOfAParameterAreNoticed) {
  on_ranks(3, [](const Group& world) {
    StateCensus census(2, world.rank());
    census.count(0, 1, true, bytes_of(world.rank() == 1 ? "other" : "one"));
    census.count(1, 1, true, bytes_of("one"));
    census.exchange(world);
    EXPECT_TRUE(census.find(0).counts);
    EXPECT_FALSE(census.find(0).is_one);
    EXPECT_TRUE(census.find(1).is_one);
    EXPECT_EQ(census.description(1), bytes_of("one"));
  });
}

TEST(StateCensusTest, WhatDoesNotCountMayDiffer) {
  on_ranks(3, [](const Group& world) {
    StateCensus census(2, world.rank());
    const bool counts = world.rank() == 2;
    census.count(
        0, counts ? 4 : 0, counts, bytes_of(counts ? "state" : "leftovers"));
    census.count(1, 0, false, bytes_of("leftovers"));
    census.exchange(world);
    EXPECT_EQ(census.find(0).ranks, 3);
    EXPECT_EQ(census.find(0).elements, 4);
    EXPECT_TRUE(census.find(0).is_one);
    EXPECT_EQ(census.description(0), bytes_of("state"));
    EXPECT_EQ(census.find(1).ranks, 3);
    EXPECT_FALSE(census.find(1).counts);
  });
}

} // namespace
} // namespace tessera::transfer
