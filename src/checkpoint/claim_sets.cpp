#include "checkpoint/claim_sets.h"

namespace tessera::checkpoint {

void ClaimSets::add(const std::vector<Bytes>& texts, const Place& place) {
  const std::vector<Claim>*& set = known_[place];
  if (set == nullptr) {
    const auto [heads, is_new] = heads_.try_emplace(place.heads);
    if (is_new) {
      heads->second = unpack_heads(texts.at(place.heads));
    }
    set = &sets_.emplace_back(unpack_claims(
        heads->second,
        texts.at(place.boxes),
        texts.at(place.others),
        /*all=*/is_new));
  }
  by_rank_.push_back(set);
}

} // namespace tessera::checkpoint
