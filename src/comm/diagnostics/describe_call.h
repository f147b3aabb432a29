// Short texts for tensors and reductions in calls and errors.
#pragma once

#include <tessera/comm/reduce_op.h>

#include <ATen/core/Tensor.h>

#include <string_view>

#include "comm/diagnostics/call.h"

namespace tessera::comm {

/// "SUM", "AVG", "MIN", "MAX".
std::string_view name_of(ReduceOp op);

/// The call of `operation` on `input` (may be undefined), but for its sequence.
/// `suffix` is what else belongs to it: "SUM", "root 2". On the path of every
/// collective, so without allocation.
Call describe_call(
    std::string_view operation,
    const at::Tensor& input,
    std::string_view suffix = {},
    std::string_view label = {});

/// The call of a message, whose digest covers what sender and receiver must
/// agree on: dtype and label. Its bytes are compared too.
Call describe_message(
    std::string_view operation,
    const at::Tensor& tensor,
    std::string_view suffix,
    std::string_view label);

} // namespace tessera::comm
