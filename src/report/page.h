// The page that shows a run.
#pragma once

#include <filesystem>
#include <string>

#include "report/run.h"

namespace tessera::report {

/// What the page's script draws, as JSON: curves thinned out, lists cut to what
/// a reader would look at. Some hundred kilobytes as a rule, below 3 MB always.
std::string page_data(const Run& run);

/// One HTML page that needs nothing else. Texts from the log reach the reader
/// as text only, whatever is in them.
std::string make_page(const Run& run);

/// Writes the page beside `path` and renames it, so that there is never half a
/// page; where a link leads, it is written there, and into a device or a pipe
/// as it comes. Throws ReportError.
void write_page(const Run& run, const std::filesystem::path& path);

} // namespace tessera::report
