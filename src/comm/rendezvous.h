// How the processes of a run become a world.
#pragma once

#include <string>
#include <vector>

#include "comm/store/store.h"

namespace tessera::comm {

/// What the other ranks need to know about one rank.
struct Member {
  std::string host; // host_identity()
  int world_size = 0; // as that rank understands it
  int cuda_devices = 0;
  int torch_version = 0; // major * 100 + minor
  std::string settings; // must be equal on all ranks; without spaces

  std::string encode() const;
  static Member decode(const std::string& text);
};

/// [Note: one verdict]
///
/// Each rank leaves its record in the store and waits for one key, the
/// verdict. The last rank to come checks all records and writes "ok" with the
/// whole table; the first rank that finds something wrong (a number claimed
/// twice, a world size that differs, a wait that timed out) writes the error
/// instead. The key is written once, so that all ranks, late ones too, end the
/// same way. A rank that hosts the store stays a moment after a bad verdict, so
/// that the others can read it.
///
/// Returns all members by rank. Throws on every rank or on none.
std::vector<Member> join(
    c10d::Store& store,
    bool hosts_store,
    int rank,
    const Member& self,
    Milliseconds timeout);

/// Ends a join() of the other ranks with `reason`: for a process that cannot
/// take part at all.
void refuse(c10d::Store& store, const std::string& reason);

} // namespace tessera::comm
