#pragma once

#include <tessera/api.h>

#include <filesystem>
#include <vector>

namespace tessera {

/// Reads `run`/log.jsonl and writes `run`/report.html: one self-contained page
/// that shows the run. Returns the page's path.
///
/// Call it on one rank: it does not communicate. The page appears complete or
/// not at all; an existing page is replaced. A log that is still being written
/// is fine. Lines that cannot be read are named in the page and in a warning.
/// Throws c10::Error if the run has no log, or if the page cannot be written.
TESSERA_API std::filesystem::path write_report(
    const std::filesystem::path& run);

/// The same for 1 to 8 runs, in one page that is written to `page`: the curves
/// of the runs in the same charts, their numbers and settings side by side. A
/// run's log may be given in place of its folder. Returns `page`. With one run
/// the page is the one above.
///
/// Throws c10::Error also if there is no run or more than 8, or if a run is
/// named twice; then nothing is written.
TESSERA_API std::filesystem::path write_report(
    const std::vector<std::filesystem::path>& runs,
    const std::filesystem::path& page);

} // namespace tessera
