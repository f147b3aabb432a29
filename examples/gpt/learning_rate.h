#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "settings.h"

namespace gpt {

/// Rises for `warmup` steps, then falls along a half cosine until
/// `last_decay_step()`, and stays at `min_lr`. Steps count from 0.
double learning_rate(const Settings& settings, int64_t step);

/// A sentence if the curve changes from step `step` on, compared with the curve
/// that the last start in the run's log tells; otherwise empty. Empty too if
/// there is no log, or if the log does not tell the curve.
std::string curve_change(
    const Settings& settings,
    const std::filesystem::path& log,
    int64_t step);

} // namespace gpt
