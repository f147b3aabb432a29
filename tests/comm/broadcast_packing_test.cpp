#include "comm/group/broadcast_packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <set>

namespace tessera::comm {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kMb = 1 << 20;

TEST(BroadcastPackingTest, SmallTensorsArePacked) {
  EXPECT_THAT(
      pack_broadcasts({3 * kMb, 10, 2 * kMb, 5}),
      ElementsAre(ElementsAre(0), ElementsAre(2), ElementsAre(1, 3)));
  EXPECT_EQ(pack_broadcasts(std::vector<int64_t>(26, kMb - 1)).size(), 2);
  EXPECT_TRUE(pack_broadcasts({}).empty());
}

TEST(BroadcastPackingTest, EachTensorTravelsOnce) {
  EXPECT_TRUE(rc::check([] {
    const auto bytes = *rc::gen::container<std::vector<int64_t>>(
        rc::gen::inRange<int64_t>(1, 2 * kMb));
    std::set<size_t> seen;
    for (const auto& pack : pack_broadcasts(bytes)) {
      RC_ASSERT(!pack.empty());
      int64_t total = 0;
      for (const size_t tensor : pack) {
        RC_ASSERT(seen.insert(tensor).second);
        RC_ASSERT(pack.size() == 1 || bytes[tensor] < kMb);
        total += bytes[tensor];
      }
      RC_ASSERT(pack.size() == 1 || total <= 25 * kMb);
    }
    RC_ASSERT(seen.size() == bytes.size());
  }));
}

} // namespace
} // namespace tessera::comm
