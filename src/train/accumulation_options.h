// The options of an accumulation, checked and compared.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/train/gradient_accumulation.h>

#include <vector>

namespace tessera::train {

/// Throws c10::ValueError for options out of range, and for optimizers that
/// cannot be stepped after an accumulation.
void check_accumulation(
    const GradientAccumulationOptions& options,
    const OptimizerRefs& optimizers);

/// Throws DisagreementError unless all ranks of each group have these options.
/// Collective.
void agree_on_accumulation(
    const GradientAccumulationOptions& options,
    const std::vector<Group>& groups);

} // namespace tessera::train
