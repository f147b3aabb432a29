// `tessera report`: the page that shows a training run or compares several.
#include <CLI/CLI.hpp>

#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "report/named_runs.h"
#include "report/page.h"
#include "report/summary.h"

namespace tessera::cli {
namespace {

struct ReportSettings {
  std::vector<std::string> runs;
  std::string output;
};

/// Where the page is if nobody says: beside the log of the first run.
std::filesystem::path usual_page(const std::vector<report::NamedRun>& runs) {
  return runs.front().folder /
      (runs.size() == 1 ? "report.html" : "comparison.html");
}

int make_report(const ReportSettings& settings) {
  const auto runs =
      report::read_runs({settings.runs.begin(), settings.runs.end()});
  for (const report::NamedRun& named : runs) {
    if (runs.size() > 1 && named.run.num_problems > 0) {
      std::cerr << named.folder.string() << ": ";
    }
    std::cerr << report::problems_text(named.run);
  }
  const std::filesystem::path page = settings.output.empty()
      ? usual_page(runs)
      : std::filesystem::path(settings.output);
  report::write_comparison(runs, page);
  std::cout << page.string() << "\n";
  for (const report::NamedRun& named : runs) {
    std::cout
        << (runs.size() == 1 ? report::summary_text(named.run)
                             : report::summary_text(named.run, named.label));
  }
  return 0;
}

} // namespace

Action add_report(CLI::App& app) {
  auto settings = std::make_shared<ReportSettings>();
  auto* command = app.add_subcommand(
      "report",
      "Make a page that shows a training run from its log, or compares several");
  command
      ->add_option(
          "RUN",
          settings->runs,
          "Folder with log.jsonl; several are compared in one page")
      ->required();
  command->add_option(
      "--out,--output",
      settings->output,
      "The page (default: RUN/report.html; for several runs "
      "comparison.html in the first)");
  return [settings] { return make_report(*settings); };
}

} // namespace tessera::cli
