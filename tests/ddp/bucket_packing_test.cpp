#include "ddp/bucket_packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <set>

namespace tessera::ddp {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kMb = 1 << 20;

TEST(BucketPackingTest, TheFirstBucketIsSmallAndKindsHaveTheirOwn) {
  const std::vector<GradientSize> order{
      {kMb / 2}, {kMb}, {20 * kMb}, {1, 7}, {10 * kMb}, {5}, {2, 7}};
  EXPECT_THAT(
      pack_buckets(order, {}),
      ElementsAre(
          ElementsAre(0, 1),
          ElementsAre(2, 4),
          ElementsAre(3, 6),
          ElementsAre(5)));
}

TEST(BucketPackingTest, WithoutLimitEachGradientHasItsOwnBucket) {
  const BucketLimits none{.first_bucket_bytes = 0, .bucket_bytes = 0};
  EXPECT_THAT(
      pack_buckets({{4}, {4}, {4}}, none),
      ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
}

std::vector<GradientSize> some_gradients() {
  std::vector<GradientSize> order;
  for (const auto& [bytes, kind] :
       *rc::gen::container<std::vector<std::pair<int, int>>>(
           rc::gen::pair(rc::gen::inRange(0, 40), rc::gen::inRange(0, 3)))) {
    order.push_back({bytes, kind});
  }
  return order;
}

TEST(BucketPackingTest, BucketsHoldEachGradientOnceInOrder) {
  EXPECT_TRUE(rc::check([] {
    const auto order = some_gradients();
    const auto buckets = pack_buckets(
        order,
        {.first_bucket_bytes = *rc::gen::inRange(0, 50),
         .bucket_bytes = *rc::gen::inRange(0, 100)});
    std::set<size_t> seen;
    size_t last_opened = 0;
    for (const auto& bucket : buckets) {
      RC_ASSERT(!bucket.empty());
      RC_ASSERT(std::is_sorted(bucket.begin(), bucket.end()));
      RC_ASSERT(bucket.front() >= last_opened);
      last_opened = bucket.front();
      for (const size_t gradient : bucket) {
        RC_ASSERT(order[gradient].kind == order[bucket.front()].kind);
        RC_ASSERT(seen.insert(gradient).second);
      }
    }
    RC_ASSERT(seen.size() == order.size());
  }));
}

TEST(BucketPackingTest, OnlyTheLastGradientPassesTheLimit) {
  EXPECT_TRUE(rc::check([] {
    const auto order = some_gradients();
    const BucketLimits limits{
        .first_bucket_bytes = *rc::gen::inRange(1, 50),
        .bucket_bytes = *rc::gen::inRange(1, 100)};
    const auto buckets = pack_buckets(order, limits);
    for (size_t i = 0; i < buckets.size(); ++i) {
      const int64_t limit =
          i == 0 ? limits.first_bucket_bytes : limits.bucket_bytes;
      int64_t before_last = 0;
      for (size_t j = 0; j + 1 < buckets[i].size(); ++j) {
        before_last += order[buckets[i][j]].bytes;
      }
      RC_ASSERT(before_last < limit);
    }
  }));
}

} // namespace
} // namespace tessera::ddp
