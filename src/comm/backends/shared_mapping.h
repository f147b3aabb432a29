// A segment of memory that all ranks of a group map.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/backends/backends.h"
#include "comm/shm/segment.h"

namespace tessera::comm {

/// As rank 0 announced it.
struct SharedMapping {
  shm::Segment segment;
  std::string announcement; // rank 0's words, besides the place
  std::vector<std::string> answers; // each rank's process number
};

/// Maps one segment on all ranks. Rank 0 makes the segment; `announce` gives
/// its size and some words for the other ranks. What went wrong on any rank is
/// thrown on all: CannotShareMemory if only the mapping failed.
SharedMapping map_together(
    const BackendConfig& config,
    const std::string& key,
    const std::function<std::pair<size_t, std::string>()>& announce);

} // namespace tessera::comm
