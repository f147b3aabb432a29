// Fail on every rank or on none, with one's own words where one has them.
#pragma once

#include <tessera/comm/group.h>

#include <functional>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// Runs `body`, which must not communicate. If it throws on any rank of the
/// groups, all of them throw: where it did, what it threw; elsewhere a
/// c10::ValueError that tells of it. Collective over the groups; without any,
/// the same as calling it.
void all_or_none(
    const std::vector<Group>& groups,
    std::string_view call,
    const std::function<void()>& body);

/// Runs `body`, which throws on all ranks of a group or on none, for each
/// group, and throws what it threw first at the end: ranks of the groups that
/// come later wait for this one too.
void for_each_group(
    const std::vector<Group>& groups,
    const std::function<void(const Group&)>& body);

} // namespace tessera::comm
