// What the ranks tell each other when a backward has ended, and the errors that
// come of it on every rank.
#pragma once

#include <tessera/comm/group.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace tessera::ddp {

/// Throws on every rank if a hook threw on any; `failure` is what it threw
/// here. Gives `group` up if only some threw: the others wait for the
/// collectives of theirs. Collective over `control`.
void fail_if_any_hook_threw(
    const Group& group,
    const Group& control,
    std::exception_ptr& failure);

/// Throws DisagreementError if ranks made different numbers of forwards.
/// `by_rank` has three numbers per rank; the last is its number of forwards,
/// negative for a rank without inputs.
void compare_forwards(const Group& group, const int64_t* by_rank);

/// Throws on every rank. `names` are this rank's parameters without a gradient;
/// at least one rank has some. Collective.
[[noreturn]] void refuse_missing(
    const Group& group,
    const std::vector<std::string>& names,
    size_t num_params);

/// Throws on every rank if any rank passes a name of a parameter that trains
/// and is not averaged. Collective.
void refuse_unknown(const Group& group, const std::vector<std::string>& names);

/// Which parameters any rank used. Collective.
std::vector<bool> used_anywhere(
    const Group& group,
    const std::vector<bool>& was_used);

} // namespace tessera::ddp
