// What a rank that waits for long finds out about the calls of the others.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/byte_vector.h"
#include "comm/backends/backends.h"
#include "comm/diagnostics/recent_calls.h"

namespace tessera::comm {

/// [Note: long waits]
///
/// Where a backend compares no calls, ranks that make different calls wait for
/// each other until their timeout. So each rank keeps its last calls. When it
/// has waited for a second it puts them into the store, and from then on looks
/// there for those of the other ranks, of one rank at each lookout. If two
/// ranks made different calls of one number, no waiting can mend that: they
/// give the group up, and every rank says which calls these were.
///
/// A rank that is slow, or in no call, has made the same calls as the others as
/// far as it got, so there is nothing to find. Nor do ranks find calls that
/// only one of them has kept. What a call is for (its label) is not compared
/// here, nor are calls that all ranks compared themselves, and whose difference
/// the program may have handled. Calls that are made on a device are not kept:
/// the host does not wait for them.
class LongWait {
 public:
  /// `mine` must outlive this object; null where the backend compares calls.
  LongWait(
      const StorePtr& store,
      const RecentCalls* mine,
      int rank,
      const std::vector<int>& global_ranks);

  /// Call it at each lookout. Returns what the ranks made differently, if that
  /// was found. Throws if the store is gone.
  std::optional<std::string> look();

 private:
  std::optional<Bytes> calls_of(int rank) const;
  std::string describe(uint64_t sequence, int peer, const Bytes& theirs) const;

  const StorePtr& store_;
  const RecentCalls* mine_;
  const int rank_;
  const std::vector<int>& global_ranks_;
  int num_lookouts_ = 0;
};

} // namespace tessera::comm
