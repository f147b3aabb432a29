// Clipping that does not wait for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/clipped_gradients.h"

namespace tessera::fsdp {

/// What clip_grad_norm_ does, with norms and factor on the device: the host
/// reads nothing, and gradients are multiplied also where the factor is 1. Only
/// if several ranks have parameters that are not sharded, the host reads their
/// norms once, to compare the ranks. Returns the norm, a scalar in double.
/// Collective.
at::Tensor clip_on_device(
    const ClippedGradients& gradients,
    double max_norm,
    double norm_type);

} // namespace tessera::fsdp
