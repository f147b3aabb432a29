// Tensors as the collectives on shared memory take them: addresses and numbers
// of bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/shm/collectives.h"

namespace tessera::comm {

inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

/// For inputs: memory that is shared until somebody writes to it (async_save()
/// reads such memory) stays shared.
inline const std::byte* const_bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

/// One list of spans per rank, with one span. Splits are rows of dim 0; without
/// any the parts are equal.
std::vector<shm::Collectives::Spans> spans_of(
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    int num_ranks);
/// One list of spans per rank, with one span per tensor that has elements.
std::vector<shm::Collectives::Spans> spans_of(
    const std::vector<std::vector<at::Tensor>>& pieces);

/// How elements of the tensor's dtype are combined. Throws c10::ValueError if
/// that is not defined.
shm::Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op);

/// Throws c10::ValueError.
void require_contiguous(const at::Tensor& tensor);

} // namespace tessera::comm
