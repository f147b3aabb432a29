// `tessera report`: the page that shows a training run.
#include <CLI/CLI.hpp>

#include <filesystem>
#include <iostream>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "report/page.h"
#include "report/run_reader.h"
#include "report/summary.h"

namespace tessera::cli {
namespace {

constexpr const char* kLog = "log.jsonl";

struct ReportSettings {
  std::string run;
  std::string output;
};

int make_report(const ReportSettings& settings) {
  std::filesystem::path folder = settings.run;
  if (folder.filename() == kLog) { // the log itself may be given
    folder = folder.parent_path();
  }
  const report::Run run = report::read_run(folder / kLog);
  std::cerr << report::problems_text(run);
  const std::filesystem::path page = settings.output.empty()
      ? folder / "report.html"
      : std::filesystem::path(settings.output);
  report::write_page(run, page);
  std::cout << page.string() << "\n" << report::summary_text(run);
  return 0;
}

} // namespace

Action add_report(CLI::App& app) {
  auto settings = std::make_shared<ReportSettings>();
  auto* command = app.add_subcommand(
      "report", "Make a page that shows a training run from its log");
  command->add_option("RUN", settings->run, "Folder with log.jsonl")
      ->required();
  command->add_option(
      "--output", settings->output, "The page (default: RUN/report.html)");
  return [settings] { return make_report(*settings); };
}

} // namespace tessera::cli
