// Fail on every rank or on none: share_failures() is the exchange, and
// fail_together(), all_or_none() and checkpoint::settle() differ in what each
// rank throws afterwards.
#pragma once

#include <tessera/comm/group.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// The failures of all ranks by rank of the group, `mine` among them; none if
/// no rank failed. Every rank gets the same. Costs one exchange of 4 bytes if
/// no rank failed. Collective.
std::map<int, std::string> share_failures(
    const Group& group,
    const std::optional<std::string>& mine,
    std::string_view label);

/// Runs `body`, which must not communicate. If `body` throws on any rank of the
/// groups, all ranks throw: a rank where `body` threw throws the same, the
/// others a c10::ValueError with the text. Collective over the groups; without
/// a group it only runs `body`. So does a step that is being captured: if it
/// fails on one rank, no rank has captured it.
void all_or_none(
    const std::vector<Group>& groups,
    std::string_view call,
    const std::function<void()>& body);

/// Runs `body`, which throws on all ranks of a group or on none, for each
/// group, and throws the first exception at the end: the ranks of the later
/// groups wait for this rank too.
void for_each_group(
    const std::vector<Group>& groups,
    const std::function<void(const Group&)>& body);

} // namespace tessera::comm
