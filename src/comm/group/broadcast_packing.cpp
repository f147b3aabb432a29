#include "comm/group/broadcast_packing.h"

#include <utility>

namespace tessera::comm {
namespace {

constexpr int64_t kPackBytes = 25 << 20;
/// Copying less than this costs less than a broadcast of its own.
constexpr int64_t kSmallBytes = 1 << 20;

} // namespace

std::vector<std::vector<size_t>> pack_broadcasts(
    const std::vector<int64_t>& bytes) {
  std::vector<std::vector<size_t>> broadcasts;
  std::vector<size_t> pack;
  int64_t pack_bytes = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] >= kSmallBytes) {
      broadcasts.push_back({i});
      continue;
    }
    if (pack_bytes + bytes[i] > kPackBytes) {
      broadcasts.push_back(std::exchange(pack, {}));
      pack_bytes = 0;
    }
    pack.push_back(i);
    pack_bytes += bytes[i];
  }
  if (!pack.empty()) {
    broadcasts.push_back(std::move(pack));
  }
  return broadcasts;
}

} // namespace tessera::comm
