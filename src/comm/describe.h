// Short texts for tensors and reductions in calls and errors.
#pragma once

#include <tessera/comm/reduce_op.h>

#include <ATen/core/Tensor.h>

#include <string_view>

namespace tessera::comm {

/// "SUM", "AVG", "MIN", "MAX".
std::string_view name_of(ReduceOp op);

/// Writes "Float [4, 8]" (cut to fit) into a field of a Call; `suffix` behind
/// it. On the path of every collective, so without allocation.
void describe_tensor(
    char* field,
    size_t capacity,
    const at::Tensor& tensor,
    std::string_view suffix);

template <size_t N>
void describe_tensor(
    char (&field)[N],
    const at::Tensor& tensor,
    std::string_view suffix = {}) {
  describe_tensor(field, N, tensor, suffix);
}

} // namespace tessera::comm
