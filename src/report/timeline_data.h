#pragma once

#include <nlohmann/json.hpp>

#include "report/run.h"

namespace tessera::report {

/// The timelines of a run as the page's script draws them: the longest spans of
/// the first ranks.
nlohmann::json timelines_data(const Run& run);

} // namespace tessera::report
