#include <tessera/train/report.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "report/support.h"

namespace tessera {
namespace {

using report::ScratchFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(WriteReportTest, WritesThePageIntoTheRun) {
  const ScratchFolder run;
  report::write_file(
      run / "log.jsonl", report::start_line() + report::step_lines(0, 5));
  const auto page = write_report(run.path());
  EXPECT_EQ(page, run / "report.html");
  EXPECT_THAT(report::read_file(page), HasSubstr("<!doctype html>"));
}

TEST(WriteReportTest, RejectsARunWithoutALog) {
  const ScratchFolder run;
  try {
    write_report(run.path());
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_THAT(
        error.what_without_backtrace(),
        AllOf(HasSubstr("[write_report] there is no"), HasSubstr("log.jsonl")));
  }
}

} // namespace
} // namespace tessera
