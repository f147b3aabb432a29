// Converts ranges of flattened elements to boxes.
#pragma once

#include <tessera/engine/sharded_tensor.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "engine/layout.h"

namespace tessera::engine {

/// The boxes that make up elements [begin, begin + numel) of a flattened tensor
/// of this shape, in that order: at most 2 * ndim - 1 boxes, each contiguous in
/// the tensor. None for an empty range.
std::vector<ShardedTensor::Box> boxes_of(
    const Shape& shape,
    int64_t begin,
    int64_t numel);

/// A view of that box of `whole`.
at::Tensor view_of(const at::Tensor& whole, const ShardedTensor::Box& box);

} // namespace tessera::engine
