#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include "parallel.h"
#include "settings.h"
#include "windows.h"

namespace gpt {

/// The mean loss over --eval-windows windows, spread over the text; the same on
/// any number of ranks, but for rounding. Collective.
double validation_loss(
    Parallel& parallel,
    const Windows& windows,
    const Settings& settings,
    const tessera::Group& world,
    torch::Device device);

} // namespace gpt
