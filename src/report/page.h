// The page that shows a run, and the page that compares several.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "report/named_runs.h"
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

/// The same for several runs: their curves in the same charts, their numbers
/// and settings side by side. Curves have fewer points the more runs there are.
std::string comparison_data(const std::vector<NamedRun>& runs);
std::string make_comparison(const std::vector<NamedRun>& runs);
/// With one run, the page is the one that write_page makes.
void write_comparison(
    const std::vector<NamedRun>& runs,
    const std::filesystem::path& path);

} // namespace tessera::report
