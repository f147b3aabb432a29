#include "plan/buckets.h"

#include <cstddef>
#include <map>

#include "plan/checked.h"

namespace tessera::plan {
namespace {

/// DDPOptions::first_bucket_mb() and bucket_cap_mb().
constexpr int64_t kFirstBucketBytes = 1 << 20;
constexpr int64_t kBucketBytes = 25 << 20;

} // namespace

std::vector<int64_t> buckets_of(const std::vector<BucketItem>& order) {
  std::vector<int64_t> buckets;
  std::map<format::DType, size_t> open; // the last bucket of each dtype
  for (const BucketItem& item : order) {
    const auto [bucket, is_new] = open.try_emplace(item.dtype, buckets.size());
    const int64_t limit =
        bucket->second == 0 ? kFirstBucketBytes : kBucketBytes;
    if (is_new || buckets[bucket->second] >= limit) {
      bucket->second = buckets.size();
      buckets.push_back(0);
    }
    buckets[bucket->second] = plus(buckets[bucket->second], item.bytes);
  }
  return buckets;
}

} // namespace tessera::plan
