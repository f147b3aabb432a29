// The page that shows a run.
#pragma once

#include <filesystem>
#include <string>

#include "report/run.h"

namespace tessera::report {

/// The data that the page's script draws, as JSON: curves are thinned out,
/// lists are cut to a readable length. Usually some hundred kilobytes, always
/// below 3 MB.
std::string page_data(const Run& run);

/// One self-contained HTML page. Texts from the log are shown as plain text,
/// whatever they contain.
std::string make_page(const Run& run);

/// Writes the page beside `path` and renames it, so that a partial page never
/// exists. A link is followed; a device or a pipe is written to directly.
/// Throws ReportError.
void write_page(const Run& run, const std::filesystem::path& path);

} // namespace tessera::report
