#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "report/page.h"
#include "report/support.h"

namespace tessera::report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

nlohmann::json compared(const std::vector<std::string>& logs) {
  std::vector<NamedRun> runs;
  for (const std::string& log : logs) {
    runs.push_back(
        {.label = "run " + std::to_string(runs.size()),
         .folder = "folder",
         .run = read_text(log)});
  }
  return nlohmann::json::parse(comparison_data(runs));
}

TEST(ComparisonTest, HasTheCurvesOfEachRun) {
  const auto data = compared(
      {start_line() + step_lines(0, 5),
       start_line() + step_lines(0, 9) + start_line(1, 4) + step_lines(4, 7)});
  ASSERT_THAT(data["runs"], SizeIs(2));
  EXPECT_EQ(data["runs"][0]["label"], "run 0");
  EXPECT_THAT(data["runs"][0]["loss"]["steps"], SizeIs(5));
  EXPECT_THAT(data["runs"][1]["loss"]["steps"], SizeIs(7));
  EXPECT_THAT(data["runs"][1]["loss"]["old"], SizeIs(1));
  EXPECT_THAT(data["runs"][1]["attempts"], SizeIs(2));
  EXPECT_EQ(data["runs"][0]["summary"]["last_step"], 5);
}

TEST(ComparisonTest, MarksTheNewestAttempts) {
  std::string log;
  for (int attempt = 0; attempt < 300; ++attempt) {
    log += start_line(attempt, attempt, attempt);
  }
  const auto run = compared({log, start_line()})["runs"][0];
  EXPECT_EQ(run["num_attempts"], 300);
  ASSERT_THAT(run["attempts"], SizeIs(40));
  EXPECT_EQ(run["attempts"].back()["start_step"], 299);
  EXPECT_EQ(run["attempts"].back()["world"], 299);
}

TEST(ComparisonTest, MemoryIsOneCurve) {
  const auto data = compared(
      {R"({"kind":"start"})"
       "\n"
       R"({"kind":"step","step":3,"memory":{"full":7,"shards":5}})"
       "\n",
       start_line()});
  EXPECT_EQ(data["runs"][0]["memory"]["steps"], (std::vector{3}));
  EXPECT_EQ(data["runs"][0]["memory"]["values"], (std::vector{12}));
  EXPECT_THAT(data["runs"][1]["memory"]["steps"], SizeIs(0));
}

TEST(ComparisonTest, SaysWhichSettingsDiffer) {
  const auto data = compared(
      {R"({"kind":"start","world":2,"device":"cpu","config":{"lr":1,"seed":3,"only":true}})",
       R"({"kind":"start","world":4,"device":"cpu","config":{"lr":2,"seed":3}})"});
  std::map<std::string, nlohmann::json> rows;
  for (const auto& row : data["settings"]) {
    rows[row["name"]] = row;
  }
  EXPECT_THAT(rows, SizeIs(5));
  EXPECT_EQ(rows["lr"]["differs"], true);
  EXPECT_EQ(rows["lr"]["values"], (std::vector<std::string>{"1", "2"}));
  EXPECT_EQ(rows["seed"]["differs"], false);
  EXPECT_EQ(rows["only"]["differs"], true);
  EXPECT_TRUE(rows["only"]["values"][1].is_null());
  EXPECT_EQ(rows["device"]["differs"], false);
  EXPECT_EQ(rows["ranks"]["values"], (std::vector<std::string>{"2", "4"}));
}

TEST(ComparisonTest, CurvesHaveFewerPointsTheMoreRunsThereAre) {
  const std::string log = start_line() + step_lines(0, 4000);
  for (const size_t count : {2, 8}) {
    const auto data = compared(std::vector<std::string>(count, log));
    for (const auto& run : data["runs"]) {
      EXPECT_LE(run["loss"]["steps"].size(), 3600 / count);
      EXPECT_EQ(run["loss"]["steps"].back(), 4000);
      EXPECT_EQ(run["loss"]["mean"]["steps"].size(), count == 2 ? 450U : 225U);
    }
  }
}

TEST(ComparisonTest, TextsOfTheLogsCannotEndTheScript) {
  const std::string attack = "</script><!--<script>&<b>";
  const nlohmann::json start{
      {"kind", "start"}, {"name", attack}, {"config", {{attack, attack}}}};
  std::vector<NamedRun> runs;
  for (int i = 0; i < 2; ++i) {
    runs.push_back(
        {.label = attack, .folder = attack, .run = read_text(start.dump())});
  }
  const std::string page = make_comparison(runs);
  EXPECT_THAT(page, Not(HasSubstr(attack)));
  EXPECT_THAT(page, Not(HasSubstr("<b>")));
  EXPECT_THAT(page, Not(HasSubstr("{{")));
  const auto data = nlohmann::json::parse(comparison_data(runs));
  EXPECT_EQ(data["runs"][1]["label"], attack);
}

TEST(ComparisonTest, PathsThatAreNoTextAreShownAsFarAsTheyAre) {
  std::vector<NamedRun> runs;
  for (const char* folder : {"a\xFF", "b"}) {
    runs.push_back(
        {.label = folder, .folder = folder, .run = read_text(start_line())});
  }
  const auto data = nlohmann::json::parse(comparison_data(runs));
  EXPECT_EQ(data["runs"][0]["folder"], "a\xEF\xBF\xBD");
}

} // namespace
} // namespace tessera::report
