// Memory for tensors that are about to be filled.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::libtorch {

/// at::empty for tensors on one device that will be written from end to end. In
/// host memory most of the time of such a write goes into page faults, one for
/// every 4 KB. So the tensors are laid out in one block, for which the kernel
/// is asked for large pages. Each tensor has a storage of its own and of its
/// own size; the block is freed with the last tensor.
std::vector<at::Tensor> empty_to_fill(
    const std::vector<std::vector<int64_t>>& sizes,
    const std::vector<at::TensorOptions>& options);

} // namespace tessera::libtorch
