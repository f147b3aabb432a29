// Which rank steps which parameters of a bucket of gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::zero {

/// The parameters from `begin` to `end` of a bucket.
struct BucketPiece {
  size_t begin = 0;
  size_t end = 0;
  int rank = 0;
  bool operator==(const BucketPiece&) const = default;
};

/// For each bucket, the number of elements of each parameter.
using BucketSizes = std::vector<std::vector<int64_t>>;

/// Bucket i belongs as a whole to rank i modulo the number of ranks.
std::vector<std::vector<BucketPiece>> assign_whole_buckets(
    const BucketSizes& buckets,
    int num_ranks);

/// From the smallest bucket to the largest, each is cut before the parameter
/// with which a piece would reach the even share. A piece goes to the rank with
/// the fewest elements so far among those without a piece of this bucket, the
/// lowest on a tie; if all ranks have one, to the rank with the fewest
/// elements.
std::vector<std::vector<BucketPiece>> assign_even_buckets(
    const BucketSizes& buckets,
    int num_ranks);

} // namespace tessera::zero
