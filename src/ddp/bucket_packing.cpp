#include "ddp/bucket_packing.h"

#include <unordered_map>

namespace tessera::ddp {

std::vector<std::vector<size_t>> pack_buckets(
    const std::vector<GradientSize>& order,
    const BucketLimits& limits) {
  struct OpenBucket {
    size_t index = 0;
    int64_t bytes = 0;
  };
  std::vector<std::vector<size_t>> buckets;
  std::unordered_map<int64_t, OpenBucket> open; // the last bucket of each kind
  for (size_t i = 0; i < order.size(); ++i) {
    const auto [found, is_new] = open.try_emplace(order[i].kind);
    OpenBucket& bucket = found->second;
    const int64_t limit =
        bucket.index == 0 ? limits.first_bucket_bytes : limits.bucket_bytes;
    if (is_new || bucket.bytes >= limit) {
      bucket = {buckets.size(), 0};
      buckets.emplace_back();
    }
    buckets[bucket.index].push_back(i);
    bucket.bytes += order[i].bytes;
  }
  return buckets;
}

} // namespace tessera::ddp
