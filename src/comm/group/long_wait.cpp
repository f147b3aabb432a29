#include "comm/group/long_wait.h"

#include <tessera/error.h>

namespace tessera::comm {
namespace {

/// Of 200 ms each.
constexpr int kLookoutsBeforeComparing = 5;

std::string key_of(int rank) {
  return "recent_calls/" + std::to_string(rank);
}

} // namespace

LongWait::LongWait(
    const StorePtr& store,
    const RecentCalls* mine,
    int rank,
    const std::vector<int>& global_ranks)
    : store_(store), mine_(mine), rank_(rank), global_ranks_(global_ranks) {}

std::optional<std::string> LongWait::look() {
  const int turn = num_lookouts_++ - kLookoutsBeforeComparing;
  const auto num_peers = static_cast<int>(global_ranks_.size()) - 1;
  if (turn < 0 || mine_ == nullptr || !store_ || num_peers == 0) {
    return std::nullopt;
  }
  if (turn == 0) {
    store_->set(key_of(rank_), mine_->bytes());
  }
  const int peer = (rank_ + 1 + turn % num_peers) % (num_peers + 1);
  const auto theirs = calls_of(peer);
  const auto differing = theirs ? mine_->differing_from(*theirs) : std::nullopt;
  return differing ? std::optional(describe(*differing, peer, *theirs))
                   : std::nullopt;
}

std::optional<Bytes> LongWait::calls_of(int rank) const {
  if (!store_->check({key_of(rank)})) {
    return std::nullopt;
  }
  return store_->get(key_of(rank));
}

/// The calls of that number on all ranks that wait; `theirs` are those of
/// `peer`, which may have put others into the store since.
std::string LongWait::describe(uint64_t sequence, int peer, const Bytes& theirs)
    const {
  std::vector<Call> calls;
  std::vector<int> names;
  for (int rank = 0; rank < static_cast<int>(global_ranks_.size()); ++rank) {
    const auto kept = rank == rank_ ? mine_->bytes()
        : rank == peer              ? theirs
                                    : calls_of(rank).value_or(Bytes());
    if (const auto call = find_call(kept, sequence)) {
      calls.push_back(*call);
      names.push_back(global_ranks_[static_cast<size_t>(rank)]);
    }
  }
  const auto text = describe_mismatch(calls, names);
  TESSERA_INTERNAL_ASSERT(text.has_value(), "calls that differ match");
  return *text;
}

} // namespace tessera::comm
