// The claims of all ranks, as rank 0 learns them.
#pragma once

#include <compare>
#include <cstddef>
#include <deque>
#include <map>
#include <vector>

#include "checkpoint/claims.h"
#include "checkpoint/peers.h"

namespace tessera::checkpoint {

/// Ranks with the same claims share them, and of ranks that have the same
/// sharded tensors only the first has claims without boxes: so the memory is
/// that of what ranks have, not the number of ranks times the number of names.
class ClaimSets {
 public:
  /// Where among the texts the parts of a rank's PackedClaims are.
  struct Place {
    size_t heads = 0;
    size_t boxes = 0;
    size_t others = 0;

    auto operator<=>(const Place&) const = default;
  };
  /// Adds the claims of the next rank.
  void add(const std::vector<Bytes>& texts, const Place& place);

  /// By rank.
  const std::vector<const std::vector<Claim>*>& by_rank() const {
    return by_rank_;
  }

 private:
  std::deque<std::vector<Claim>> sets_; // do not move
  std::map<size_t, std::vector<Claim>> heads_; // by text
  std::map<Place, const std::vector<Claim>*> known_;
  std::vector<const std::vector<Claim>*> by_rank_;
};

} // namespace tessera::checkpoint
