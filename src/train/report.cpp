#include <tessera/error.h>
#include <tessera/train/report.h>

#include "report/error.h"
#include "report/page.h"
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

} // namespace tessera
