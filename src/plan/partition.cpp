#include "plan/partition.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "plan/checked.h"

namespace tessera::plan {
namespace {

/// As in comm/group/broadcast_owned.cpp.
constexpr int64_t kPackBytes = 25 << 20;
constexpr int64_t kSmallBytes = 1 << 20;

} // namespace

std::vector<Part> parts_of(std::vector<int64_t> params, int64_t num_ranks) {
  std::stable_sort(params.begin(), params.end(), std::greater<>());
  std::vector<Part> parts(static_cast<size_t>(
      std::min<int64_t>(num_ranks, static_cast<int64_t>(params.size()))));
  using Load =
      std::pair<int64_t, size_t>; // bytes, rank: the lowest comes first
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    loads.emplace(0, rank);
  }
  for (const int64_t bytes : params) {
    const auto [load, rank] = loads.top();
    loads.pop();
    parts[rank].bytes = plus(load, bytes);
    parts[rank].params.push_back(bytes);
    loads.emplace(parts[rank].bytes, rank);
  }
  return parts;
}

int64_t num_broadcasts(const std::vector<Part>& parts) {
  int64_t count = 0;
  for (const Part& part : parts) {
    int64_t packed = 0;
    for (const int64_t bytes : part.params) {
      if (bytes >= kSmallBytes) {
        ++count;
      } else if (packed == 0 || packed + bytes > kPackBytes) {
        ++count;
        packed = bytes;
      } else {
        packed += bytes;
      }
    }
  }
  return count;
}

} // namespace tessera::plan
