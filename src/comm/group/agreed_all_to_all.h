// An all-to-all whose sizes the ranks need not compare.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <string_view>

namespace tessera::comm {

/// Group::all_to_all() with splits, asynchronous. For callers that compute the
/// splits from what the ranks have agreed on: what rank i sends to rank j is
/// what j expects from i. The splits are not compared, so the call does not
/// wait for the other ranks. Collective.
Work start_agreed_all_to_all(
    const Group& group,
    const at::Tensor& output,
    const at::Tensor& input,
    at::IntArrayRef output_splits,
    at::IntArrayRef input_splits,
    std::string_view label);

} // namespace tessera::comm
