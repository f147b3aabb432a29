// Tensors that are about to be filled.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::engine {

/// at::empty for tensors that will be written from end to end, all of one
/// device. In host memory most of the time of such a write goes into page
/// faults, one for every 4 KB. So they are laid out in one block, for which the
/// kernel is asked for large pages. Each has a storage of its own, of its own
/// size; the block is freed with the last of them.
std::vector<at::Tensor> empty_to_fill(
    const std::vector<std::vector<int64_t>>& sizes,
    const std::vector<at::TensorOptions>& options);

} // namespace tessera::engine
