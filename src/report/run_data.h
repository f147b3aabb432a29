// What the page of one run and that of several say of a run.
#pragma once

#include <nlohmann/json.hpp>

#include "report/run.h"

namespace tessera::report {

/// The numbers of the tiles.
nlohmann::json summary_data(const Run& run);
/// What ran and where, as the last attempt reports.
nlohmann::json facts_data(const Run& run);
/// The newest attempts.
nlohmann::json attempts_data(const Run& run);
/// The lines that could not be read.
nlohmann::json problems_data(const Run& run);
/// A text that the model wrote.
nlohmann::json sample_data(const Sample& sample);

/// How many attempts, and other things of which there may be many, are listed.
inline constexpr size_t kListed = 200;

} // namespace tessera::report
