// What follows from where the ranks of a world are.
#pragma once

#include <string>
#include <vector>

#include "comm/backend_choice.h"
#include "comm/environment.h"
#include "comm/rendezvous.h"

namespace tessera::comm {

/// By rank, counted from 0 in the order of the ranks.
std::vector<int> number_hosts(const std::vector<Member>& members);

/// Throws c10::ValueError if "nccl" is asked for and is not possible.
bool decide_on_nccl(
    BackendChoice backend,
    const Environment& environment,
    const std::vector<Member>& members);

/// Warns of ranks that are on one host for their user and cannot share memory.
void warn_if_apart(BackendChoice backend, const std::vector<Member>& members);

} // namespace tessera::comm
