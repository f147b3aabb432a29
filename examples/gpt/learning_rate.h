#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "settings.h"

namespace gpt {

/// Rises for `warmup` steps, then falls along a half cosine until
/// `last_decay_step()`, and stays at `min_lr`. Steps count from 0.
double learning_rate(const Settings& settings, int64_t step);

/// A sentence if the curve that the run has followed so far, which the last
/// start in its log tells, is another one from step `step` on; else empty. A
/// log that does not exist or does not tell it is no error.
std::string curve_change(
    const Settings& settings,
    const std::filesystem::path& log,
    int64_t step);

} // namespace gpt
