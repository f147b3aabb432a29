// Fail on every rank or on none, with one's own words where one has them.
#pragma once

#include <tessera/comm/group.h>

#include <functional>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// Runs `body`, which must not communicate. If it throws on any rank of the
/// groups, all of them throw: where it did, what it threw; elsewhere an error
/// that tells of it. Collective over the groups; without any, the same as
/// calling it.
void together(
    const std::vector<Group>& groups,
    std::string_view call,
    const std::function<void()>& body);

} // namespace tessera::comm
