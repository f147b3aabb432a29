// Several runs that are looked at together.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "report/run.h"

namespace tessera::report {

/// So many runs have colours that can be told apart.
inline constexpr size_t kMostRuns = 8;

struct NamedRun {
  /// The name in the log, else that of the folder. Runs of equal names also
  /// have their folders in it: no two runs have the same.
  std::string label;
  std::filesystem::path folder;
  Run run;
};

/// The folder of a run; its log may be given in place of the folder.
std::filesystem::path run_folder(const std::filesystem::path& given);

/// Reads the logs of 1 to kMostRuns runs. Throws ReportError if a run has no
/// log (see read_run), if there are too few or too many runs, or if two of them
/// are the same.
std::vector<NamedRun> read_runs(
    const std::vector<std::filesystem::path>& folders);

} // namespace tessera::report
