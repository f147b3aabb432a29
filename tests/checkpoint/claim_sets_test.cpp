#include "checkpoint/claim_sets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/ranks.h"

namespace tessera::checkpoint {
namespace {

using ::testing::ElementsAre;
using testing::on_ranks;

Bytes bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

TEST(PeersTest, EqualTextsReachRank0Once) {
  on_ranks(4, [](const Group& world) {
    const Peers peers(world);
    const std::string own = world.rank() == 0 ? "" : std::string(9, 'b');
    const DistinctTexts all = peers.gather_distinct(
        {bytes_of("the same"),
         bytes_of(own),
         bytes_of(world.rank() == 3 ? "the same" : own)},
        "texts");
    if (world.rank() != 0) {
      EXPECT_TRUE(all.texts.empty());
      return;
    }
    EXPECT_THAT(
        all.texts,
        ElementsAre(bytes_of("the same"), Bytes(), bytes_of("bbbbbbbbb")));
    EXPECT_THAT(
        all.by_rank,
        ElementsAre(
            ElementsAre(0, 1, 1),
            ElementsAre(0, 2, 2),
            ElementsAre(0, 2, 2),
            ElementsAre(0, 2, 0)));
  });
}

TEST(PeersTest, EachRankGetsWhatRank0HasForIt) {
  on_ranks(3, [](const Group& world) {
    std::vector<Bytes> by_rank;
    if (world.rank() == 0) {
      by_rank = {bytes_of("a"), {}, bytes_of("ccc")};
    }
    const std::vector<std::string> expected{"a", "", "ccc"};
    const std::string& mine = expected[static_cast<size_t>(world.rank())];
    EXPECT_EQ(
        Peers(world).scatter(by_rank, mine.size(), "parts"), bytes_of(mine));
  });
}

Claim tensor(const std::string& name, std::vector<ShardedTensor::Box> boxes) {
  Claim claim;
  claim.name = name;
  claim.kind = ClaimKind::Sharded;
  claim.sizes = {8};
  claim.boxes = std::move(boxes);
  return claim;
}

Claim value(const std::string& name) {
  Claim claim;
  claim.name = name;
  claim.kind = ClaimKind::Value;
  return claim;
}

std::vector<std::string> names_of(const std::vector<Claim>& claims) {
  std::vector<std::string> names;
  for (const Claim& claim : claims) {
    names.push_back(claim.name);
  }
  return names;
}

TEST(ClaimSetsTest, RanksWithTheSameHeadsHaveOnlyWhatHasUnits) {
  const ShardedTensor::Box front{{0}, {4}};
  const ShardedTensor::Box back{{4}, {4}};
  const std::vector<std::vector<Claim>> by_rank{
      {tensor("a", {front}), value("v"), tensor("b", {})},
      {tensor("a", {}), value("v"), tensor("b", {front, back})},
      {tensor("a", {back}), value("v"), tensor("b", {})},
      {tensor("a", {back}), value("v"), tensor("b", {})},
      {value("r"),
       tensor("a", {}),
       value("s"),
       value("t"),
       tensor("b", {back})},
      {tensor("b", {})}};
  std::vector<Bytes> texts;
  ClaimSets sets;
  for (const auto& claims : by_rank) {
    const auto place = [&](const Bytes& text) {
      const auto found = std::find(texts.begin(), texts.end(), text);
      const auto at = static_cast<size_t>(found - texts.begin());
      if (found == texts.end()) {
        texts.push_back(text);
      }
      return at;
    };
    const PackedClaims packed = pack(claims);
    sets.add(
        texts,
        {.heads = place(packed.heads),
         .boxes = place(packed.boxes),
         .others = place(packed.others)});
  }
  ASSERT_EQ(sets.by_rank().size(), 6U);
  EXPECT_THAT(names_of(*sets.by_rank()[0]), ElementsAre("a", "v", "b"));
  EXPECT_THAT(sets.by_rank()[0]->at(0).boxes, ElementsAre(front));
  EXPECT_THAT(names_of(*sets.by_rank()[1]), ElementsAre("v", "b"));
  EXPECT_THAT(sets.by_rank()[1]->at(1).boxes, ElementsAre(front, back));
  EXPECT_THAT(names_of(*sets.by_rank()[2]), ElementsAre("a", "v"));
  EXPECT_EQ(sets.by_rank()[2], sets.by_rank()[3]); // the same object
  // Its sharded tensors are the same, its values its own.
  EXPECT_THAT(names_of(*sets.by_rank()[4]), ElementsAre("r", "s", "t", "b"));
  EXPECT_THAT(names_of(*sets.by_rank()[5]), ElementsAre("b"));
}

} // namespace
} // namespace tessera::checkpoint
