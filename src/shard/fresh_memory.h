// Large tensors that are filled at once.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::shard {

/// at::empty for a tensor that will be written from end to end. In host memory
/// most of the time of such a write goes into page faults, one for every 4 KB;
/// so large ones ask the kernel for large pages, where it grants them on
/// request.
at::Tensor empty_to_fill(
    at::IntArrayRef sizes,
    const at::TensorOptions& options);

} // namespace tessera::shard
