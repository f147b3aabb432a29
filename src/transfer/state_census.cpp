#include "transfer/state_census.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

#include "base/xxh3.h"

namespace tessera::transfer {
namespace {

constexpr int64_t kNothing = std::numeric_limits<int64_t>::min();

// Columns of which the largest over the ranks is taken. A digest and its
// complement are both the largest only if all ranks have the same digest.
enum Largest { kDigest, kComplement, kBytes, kMinusRank, kNumLargest };
// Columns that are added up.
enum Sum { kRanks, kElements, kNumSums };

int64_t* row_of(const at::Tensor& table, size_t row) {
  return table.mutable_data_ptr<int64_t>() +
      static_cast<int64_t>(row) * table.size(1);
}

} // namespace

StateCensus::StateCensus(size_t num_params, int rank)
    : num_params_(num_params),
      rank_(rank),
      own_(num_params),
      largest_(at::full(
          {static_cast<int64_t>(num_params), kNumLargest},
          kNothing,
          at::kLong)),
      sums_(
          at::zeros({static_cast<int64_t>(num_params), kNumSums}, at::kLong)) {}

void StateCensus::count(
    size_t param,
    int64_t elements,
    bool counts,
    Bytes description) {
  int64_t* sums = row_of(sums_, param);
  sums[kRanks] = 1;
  sums[kElements] = elements;
  if (!counts) {
    return;
  }
  static const Xxh3 xxh3 = best_xxh3();
  const auto digest =
      static_cast<int64_t>(xxh3(description.data(), description.size()));
  int64_t* largest = row_of(largest_, param);
  largest[kDigest] = digest;
  largest[kComplement] = ~digest;
  largest[kBytes] = static_cast<int64_t>(description.size());
  largest[kMinusRank] = -rank_;
  own_[param] = std::move(description);
}

void StateCensus::exchange(const Group& group) {
  if (num_params_ > 0) {
    group.all_reduce(largest_, ReduceOp::Max, "optimizer state");
    group.all_reduce(sums_, ReduceOp::Sum, "optimizer state");
  }
  lay_out_descriptions();
  share_descriptions(group);
}

StateCensus::Found StateCensus::find(size_t param) const {
  const int64_t* largest = row_of(largest_, param);
  const int64_t* sums = row_of(sums_, param);
  return {
      .ranks = sums[kRanks],
      .elements = sums[kElements],
      .counts = largest[kBytes] != kNothing,
      .is_one = largest[kDigest] == ~largest[kComplement]};
}

const Bytes& StateCensus::description(size_t param) const {
  return described_.at(at_.at(param)).bytes;
}

/// Finds the descriptions that occur, and where each begins among them.
void StateCensus::lay_out_descriptions() {
  std::unordered_map<int64_t, size_t> by_digest;
  at_.assign(num_params_, 0);
  for (size_t param = 0; param < num_params_; ++param) {
    const Found found = find(param);
    if (!found.counts || !found.is_one) {
      continue;
    }
    const int64_t* largest = row_of(largest_, param);
    const auto [same, is_new] =
        by_digest.emplace(largest[kDigest], described_.size());
    if (is_new) {
      described_.push_back(
          {.param = param,
           .sender = static_cast<int>(-largest[kMinusRank]),
           .bytes = Bytes(static_cast<size_t>(largest[kBytes]))});
    }
    at_[param] = same->second;
  }
}

/// Each rank puts the descriptions that it sends among zeros, and the sum over
/// the ranks has all of them.
void StateCensus::share_descriptions(const Group& group) {
  size_t total = 0;
  for (const Described& one : described_) {
    total += one.bytes.size();
  }
  if (total == 0) {
    return;
  }
  const at::Tensor all = at::zeros({static_cast<int64_t>(total)}, at::kByte);
  auto* bytes = static_cast<uint8_t*>(all.mutable_data_ptr());
  auto* next = bytes;
  for (const Described& one : described_) {
    if (one.sender == rank_) {
      std::copy(own_[one.param].begin(), own_[one.param].end(), next);
    }
    next += one.bytes.size();
  }
  group.all_reduce(all, ReduceOp::Sum, "optimizer state");
  for (Described& one : described_) {
    std::copy_n(bytes, one.bytes.size(), one.bytes.begin());
    bytes += one.bytes.size();
  }
}

size_t StateCensus::wire_bytes() const {
  size_t bytes = largest_.nbytes() + sums_.nbytes();
  for (const Described& one : described_) {
    bytes += one.bytes.size();
  }
  return bytes;
}

} // namespace tessera::transfer
