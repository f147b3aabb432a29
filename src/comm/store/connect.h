// How a process reaches a store and makes sure that it is the right one.
#pragma once

#include <chrono>
#include <string>

#include "base/unique_fd.h"
#include "comm/host.h"

namespace tessera::comm {

/// One attempt to reach a store on one of `addresses`, over by `deadline`,
/// though a greeting gets half a second at least. Returns no socket if the
/// attempt fails, with the reason in `problem`; another user's store on this
/// host is such a failure. A `secret` that is not empty is proved. Throws
/// c10::DistNetworkError if the store has another secret.
UniqueFd connect_to_store(
    const AddressList& addresses,
    const std::string& secret,
    std::chrono::steady_clock::time_point deadline,
    std::string& problem);

} // namespace tessera::comm
