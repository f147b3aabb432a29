#pragma once

#include <filesystem>

#include "report/run.h"

namespace tessera::report {

/// Reads a log. Lines that cannot be read are counted and named in the result;
/// a line that was cut off by a kill does not count as a problem. Throws
/// ReportError if the file cannot be read or has no line of a log at all.
Run read_run(const std::filesystem::path& log);

} // namespace tessera::report
