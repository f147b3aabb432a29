#include "zero/bucket_assignment.h"

#include <algorithm>
#include <numeric>

namespace tessera::zero {
namespace {

int64_t sum_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

/// Assigns the pieces of one bucket after another.
class Dealer {
 public:
  explicit Dealer(int num_ranks) : num_elements_(num_ranks, 0) {}

  void begin_bucket() {
    is_used_.assign(num_elements_.size(), false);
  }

  int rank_for(int64_t numel) {
    const bool all_used =
        std::find(is_used_.begin(), is_used_.end(), false) == is_used_.end();
    size_t least = num_elements_.size();
    for (size_t rank = 0; rank < num_elements_.size(); ++rank) {
      const bool may = all_used || !is_used_[rank];
      if (may &&
          (least == num_elements_.size() ||
           num_elements_[rank] < num_elements_[least])) {
        least = rank;
      }
    }
    is_used_[least] = true;
    num_elements_[least] += numel;
    return static_cast<int>(least);
  }

 private:
  std::vector<int64_t> num_elements_; // by rank
  std::vector<bool> is_used_; // for this bucket
};

std::vector<BucketPiece> cut(
    const std::vector<int64_t>& sizes,
    double share,
    Dealer& dealer) {
  std::vector<BucketPiece> pieces;
  size_t begin = 0;
  int64_t numel = 0;
  dealer.begin_bucket();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (static_cast<double>(numel + sizes[i]) >= share && i > begin) {
      pieces.push_back({begin, i, dealer.rank_for(numel)});
      begin = i;
      numel = 0;
    }
    numel += sizes[i];
  }
  pieces.push_back({begin, sizes.size(), dealer.rank_for(numel)});
  return pieces;
}

} // namespace

std::vector<std::vector<BucketPiece>> assign_whole_buckets(
    const BucketSizes& buckets,
    int num_ranks) {
  std::vector<std::vector<BucketPiece>> pieces;
  for (size_t i = 0; i < buckets.size(); ++i) {
    const int rank = static_cast<int>(i % static_cast<size_t>(num_ranks));
    pieces.push_back({{0, buckets[i].size(), rank}});
  }
  return pieces;
}

std::vector<std::vector<BucketPiece>> assign_even_buckets(
    const BucketSizes& buckets,
    int num_ranks) {
  int64_t total = 0;
  for (const auto& sizes : buckets) {
    total += sum_of(sizes);
  }
  std::vector<size_t> order(buckets.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return sum_of(buckets[a]) < sum_of(buckets[b]);
  });
  Dealer dealer(num_ranks);
  std::vector<std::vector<BucketPiece>> pieces(buckets.size());
  for (const size_t bucket : order) {
    pieces[bucket] =
        cut(buckets[bucket], static_cast<double>(total) / num_ranks, dealer);
  }
  return pieces;
}

} // namespace tessera::zero
