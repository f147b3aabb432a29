// The options of a scaler, checked.
#pragma once

#include <tessera/train/grad_scaler.h>

namespace tessera::train {

/// Throws c10::ValueError for options out of range.
void check_scaler_options(const GradScalerOptions& options, const char* call);

} // namespace tessera::train
