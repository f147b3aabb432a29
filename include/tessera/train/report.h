#pragma once

#include <tessera/api.h>

#include <filesystem>

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

} // namespace tessera
