#include <tessera/error.h>
#include <tessera/train/report.h>

#include "report/named_runs.h"
#include "report/page.h"
#include "report/report_error.h"
#include "report/run_reader.h"
#include "report/summary.h"

namespace tessera {

std::filesystem::path write_report(const std::filesystem::path& run) {
  try {
    const report::Run read = report::read_run(run / "log.jsonl");
    if (read.num_problems > 0) {
      TORCH_WARN("[write_report] ", report::problems_text(read));
    }
    const std::filesystem::path page = run / "report.html";
    report::write_page(read, page);
    return page;
  } catch (const report::ReportError& error) {
    raise({.call = "write_report"}, error.what());
  }
}

std::filesystem::path write_report(
    const std::vector<std::filesystem::path>& runs,
    const std::filesystem::path& page) {
  try {
    const auto read = report::read_runs(runs);
    for (const report::NamedRun& named : read) {
      if (named.run.num_problems > 0) {
        TORCH_WARN(
            "[write_report] \"",
            named.folder.string(),
            "\": ",
            report::problems_text(named.run));
      }
    }
    report::write_comparison(read, page);
    return page;
  } catch (const report::ReportError& error) {
    raise({.call = "write_report"}, error.what());
  }
}

} // namespace tessera
