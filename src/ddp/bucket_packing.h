// Which gradients travel together in one all-reduce. Knows no LibTorch: the
// Reducer and `tessera plan` share this policy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::ddp {

/// A gradient, as far as packing is concerned.
struct GradientSize {
  int64_t bytes = 0;
  /// Gradients of different kinds (dtype and device) never share a bucket.
  int64_t kind = 0;
};

/// A bucket that has reached its limit takes no further gradient. The first
/// bucket is small, so that its reduction starts early in backward. The
/// defaults are those of DDPOptions.
struct BucketLimits {
  int64_t first_bucket_bytes = 1 << 20;
  int64_t bucket_bytes = 25 << 20;
};

/// For each bucket the positions in `order` of its gradients. Each gradient
/// goes to the last bucket of its kind, or opens one. Buckets are in the order
/// in which they were opened.
std::vector<std::vector<size_t>> pack_buckets(
    const std::vector<GradientSize>& order,
    const BucketLimits& limits);

} // namespace tessera::ddp
