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
  EXPECT_THAT(report::read_file(page), HasSubstr("<!DOCTYPE html>"));
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

TEST(WriteReportTest, WritesOnePageForSeveralRuns) {
  const ScratchFolder first;
  const ScratchFolder second;
  report::write_file(
      first / "log.jsonl", report::start_line() + report::step_lines(0, 5));
  report::write_file(
      second / "log.jsonl", report::start_line() + report::step_lines(0, 7));
  const std::filesystem::path page = first / "both.html";
  EXPECT_EQ(write_report({first.path(), second.path()}, page), page);
  EXPECT_THAT(
      report::read_file(page), HasSubstr("Comparison of training runs"));
  // One run is shown as it is alone.
  write_report({first.path()}, page);
  EXPECT_EQ(
      report::read_file(page), report::read_file(write_report(first.path())));
}

TEST(WriteReportTest, RejectsARunThatIsNamedTwice) {
  const ScratchFolder run;
  report::write_file(run / "log.jsonl", report::start_line());
  try {
    write_report({run.path(), run / "log.jsonl"}, run / "both.html");
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_THAT(
        error.what_without_backtrace(),
        AllOf(
            HasSubstr("[write_report] "),
            HasSubstr("are the same run. Name each run once.")));
  }
  EXPECT_FALSE(std::filesystem::exists(run / "both.html"));
}

} // namespace
} // namespace tessera
