// zero::Partition, as numbers: which rank steps which parameter.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::plan {

/// What one rank owns.
struct Part {
  int64_t bytes = 0;
  std::vector<int64_t> params; // bytes of each, the largest first
};

/// The largest parameters first, each to the rank with the fewest. Ranks that
/// get none are left out. Of one dtype, so bytes do for elements.
std::vector<Part> parts_of(std::vector<int64_t> params, int64_t num_ranks);

/// Broadcasts that send what the parts' owners stepped, as
/// comm::broadcast_owned() makes them where ranks share no memory: small ones
/// are packed.
int64_t num_broadcasts(const std::vector<Part>& parts);

} // namespace tessera::plan
