// Gradients of the branch that a cond did not take.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace tessera::exported {

/// Makes `inputs` get gradients of zero through the results of a branch that
/// does not read them, as Python's cond does: so the parameters of both
/// branches have a gradient, whichever branch ran, and an optimizer steps them
/// alike on all ranks.
void connect_unread_inputs(
    const std::vector<at::Tensor>& inputs,
    std::vector<c10::IValue>& results);

} // namespace tessera::exported
