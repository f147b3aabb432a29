// The group of a sampler or a loader, which may be none.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/group/all_or_none.h"

namespace tessera::data {

/// The group that was asked for, the world, or none before init().
inline std::optional<Group> group_or_world(const std::optional<Group>& asked) {
  if (asked || !is_initialized()) {
    return asked;
  }
  return world();
}

/// Runs `body`, which does not communicate; throws on all ranks if it throws on
/// any. Collective.
inline void all_ranks_or_none(
    const std::optional<Group>& group,
    std::string_view call,
    const std::function<void()>& body) {
  comm::all_or_none(
      group ? std::vector<Group>{*group} : std::vector<Group>{}, call, body);
}

inline ErrorSite site_of(
    std::string_view call,
    const std::optional<Group>& group) {
  if (!group) {
    return {.call = call};
  }
  const auto place = static_cast<size_t>(group->rank());
  return {
      .call = call,
      .rank = group->global_ranks()[place],
      .world_size = is_initialized() ? world().size() : group->size()};
}

} // namespace tessera::data
