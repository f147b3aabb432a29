#include "report/named_runs.h"

#include <algorithm>
#include <set>

#include "report/report_error.h"
#include "report/run_reader.h"

namespace tessera::report {
namespace {

constexpr const char* kLog = "log.jsonl";

/// Two paths to one folder, or links to one log, are one run.
void check_different(const std::vector<std::filesystem::path>& folders) {
  for (size_t i = 0; i < folders.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      std::error_code none; // a log that is not there is an error later
      if (std::filesystem::equivalent(
              folders[k] / kLog, folders[i] / kLog, none)) {
        throw ReportError(
            "\"" + folders[k].string() + "\" and \"" + folders[i].string() +
            "\" are the same run. Name each run once.");
      }
    }
  }
}

std::string name_of(const NamedRun& named) {
  const std::string& name = named.run.attempts.back().name;
  if (!name.empty()) {
    return name;
  }
  // "runs/demo/" has no file name.
  const auto folder = std::filesystem::absolute(named.folder / "log")
                          .lexically_normal()
                          .parent_path();
  return folder.filename().string();
}

void label(std::vector<NamedRun>* runs) {
  std::multiset<std::string> names;
  for (NamedRun& named : *runs) {
    named.label = name_of(named);
    names.insert(named.label);
  }
  std::set<std::string> taken;
  for (NamedRun& named : *runs) {
    if (names.count(named.label) > 1) {
      named.label += " (" + named.folder.string() + ")";
    }
    // A name may look like another with its folder.
    while (!taken.insert(named.label).second) {
      named.label += "'";
    }
  }
}

} // namespace

std::filesystem::path run_folder(const std::filesystem::path& given) {
  return given.filename() == kLog ? given.parent_path() : given;
}

std::vector<NamedRun> read_runs(
    const std::vector<std::filesystem::path>& folders) {
  if (folders.empty() || folders.size() > kMostRuns) {
    throw ReportError(
        std::to_string(folders.size()) +
        " runs were named; a page shows 1 to " + std::to_string(kMostRuns) +
        ". Name fewer, or make several pages.");
  }
  std::vector<std::filesystem::path> found;
  std::transform(
      folders.begin(), folders.end(), std::back_inserter(found), run_folder);
  check_different(found);
  std::vector<NamedRun> runs;
  for (const auto& folder : found) {
    runs.push_back({.folder = folder, .run = read_run(folder / kLog)});
  }
  label(&runs);
  return runs;
}

} // namespace tessera::report
