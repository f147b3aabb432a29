#include "report/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cmath>
#include <random>

#include "report/report_error.h"
#include "report/support.h"
#include "report/timeline_shares.h"

namespace tessera::report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kManySteps = 100000;
#else
constexpr int kManySteps = 1000000;
#endif

TEST(PageDataTest, CurvesHaveWhatTheLogHas) {
  const auto data = data_of(read_text(
      start_line() +
      R"({"kind":"step","step":1,"loss":5.5,"lr":0.001,"tokens":100,"seconds":0.5,"memory":{"full":7}})"
      "\n"
      R"({"kind":"step","step":2,"loss":"nan","grad_norm":2})"
      "\n"));
  EXPECT_EQ(data["loss"]["steps"], (std::vector{1, 2}));
  EXPECT_EQ(data["loss"]["values"][0], 5.5);
  EXPECT_EQ(data["loss"]["values"][1], "nan");
  EXPECT_EQ(data["lr"]["values"], (std::vector{0.001}));
  EXPECT_EQ(data["grad_norm"]["steps"], (std::vector{2}));
  EXPECT_EQ(data["tokens_per_second"]["values"], (std::vector{200}));
  EXPECT_EQ(data["memory"]["kinds"][1]["name"], "full");
  EXPECT_EQ(data["memory"]["kinds"][1]["values"], (std::vector{7}));
  EXPECT_EQ(data["summary"]["final_loss"], "nan");
}

TEST(PageDataTest, ThinnedCurvesHaveTheirMeans) {
  const auto all = data_of(read_text(start_line() + step_lines(0, 1800)));
  EXPECT_THAT(all["loss"]["values"], SizeIs(1800));
  EXPECT_FALSE(all["loss"].contains("mean"));
  const auto thinned = data_of(read_text(start_line() + step_lines(0, 2700)));
  EXPECT_LE(thinned["loss"]["values"].size(), 1800U);
  const auto& mean = thinned["loss"]["mean"];
  ASSERT_THAT(mean["values"], SizeIs(450)); // of 6 steps each
  EXPECT_EQ(mean["counts"][0], 6);
  EXPECT_EQ(mean["values"][1], 9.5); // steps 7 to 12, whose losses they are
  EXPECT_EQ(mean["steps"][1], 10);
}

TEST(PageDataTest, TheLastEvaluationIsToldBesideTheBest) {
  const auto summary = data_of(read_text(
      start_line() +
      R"({"kind":"eval","step":1,"loss":2})"
      "\n"
      R"({"kind":"eval","step":2,"loss":"nan"})"
      "\n"))["summary"];
  EXPECT_EQ(summary["last_eval"]["step"], 2);
  EXPECT_EQ(summary["last_eval"]["loss"], "nan");
  EXPECT_EQ(summary["best_eval"]["step"], 1);
  EXPECT_TRUE(
      data_of(read_text(start_line()))["summary"]["last_eval"].is_null());
}

TEST(PageDataTest, SupersededPartsAreCurvesOfTheirOwn) {
  const auto data = data_of(read_text(
      start_line(0) + step_lines(0, 10) + start_line(1, 5) +
      step_lines(5, 12, 100)));
  EXPECT_THAT(data["loss"]["values"], SizeIs(12));
  ASSERT_THAT(data["loss"]["old"], SizeIs(1));
  EXPECT_EQ(data["loss"]["old"][0]["steps"], (std::vector{6, 7, 8, 9, 10}));
  EXPECT_THAT(data["lr"]["old"], SizeIs(0));
}

TEST(TimelineTest, OverlappingSpansCountOnce) {
  const RankTimeline rank{
      .rank = 0,
      .spans = {
          {.lane = 0, .start = 0, .end = 4},
          {.lane = 0, .start = 1, .end = 2},
          {.lane = 0, .start = 3, .end = 5},
          {.lane = 3, .start = 8, .end = 9},
          {.lane = 0, .start = 7, .end = 8}}};
  EXPECT_THAT(busy_seconds(rank), ::testing::ElementsAre(6, 0, 0, 1));
  EXPECT_EQ(end_of({.ranks = {rank}}), 9);
}

TEST(TimelineTest, TheLongestSpansAreShownWhenThereAreTooMany) {
  std::string spans;
  for (int i = 0; i < 5000; ++i) {
    spans += std::string(i == 0 ? "" : ",") +
        R"({"lane":"compute","name":"n","start":)" + std::to_string(i) +
        R"(,"end":)" + std::to_string(i + (i == 4321 ? 0.9 : 0.1)) + "}";
  }
  const auto data = data_of(read_text(
      start_line() +
      R"({"kind":"timeline","step":1,"ranks":[{"rank":0,"spans":[)" + spans +
      "]}]}\n"));
  const auto& rank = data["timelines"][0]["ranks"][0];
  EXPECT_THAT(rank["spans"], SizeIs(3000));
  EXPECT_EQ(rank["left_out"], 2000);
  EXPECT_NEAR(rank["busy"][0].get<double>(), 500.8, 1e-3);
  bool has_longest = false;
  for (const auto& span : rank["spans"]) {
    has_longest |= span[2] == 4321;
  }
  EXPECT_TRUE(has_longest);
}

TEST(PageTest, TextsOfTheLogCannotEndTheScript) {
  const std::string attack = "</script><!--<script>&<b>";
  const nlohmann::json start{
      {"kind", "start"}, {"name", attack}, {"config", {{attack, attack}}}};
  const auto run = read_text(start.dump() + "\n");
  const std::string page = make_page(run);
  EXPECT_THAT(page, Not(HasSubstr(attack)));
  EXPECT_THAT(page, Not(HasSubstr("<b>")));
  EXPECT_THAT(page, HasSubstr("\\u003c/script\\u003e"));
  EXPECT_EQ(data_of(run)["facts"]["name"], attack);
  EXPECT_THAT(page, Not(HasSubstr("{{")));
}

TEST(PageTest, PlaceholdersInTheLogStayAsTheyAre) {
  const std::string page =
      make_page(read_text(R"({"kind":"start","name":"{{page.js}}"})"));
  EXPECT_THAT(page, HasSubstr("\"{{page.js}}\""));
}

TEST(PageTest, AMillionStepsAreASmallPageSoon) {
  const ScratchFolder folder;
  {
    std::ofstream log(folder / "log.jsonl");
    log << start_line();
    for (int step = 1; step <= kManySteps; ++step) {
      log << R"({"kind":"step","time":1763200000.125,"step":)" << step
          << R"(,"loss":)" << 2 + std::sin(step) * 1.2345
          << R"(,"lr":0.000123456,"grad_norm":1.23456,"tokens":524288,"seconds":0.4)"
          << step % 1000
          << R"(,"memory":{"shards":1234567890,"full":234567890,"gradients":1234567890,"optimizer":2469135780,"activations":)"
          << 100000000 + step << R"(,"other":1234567}})"
          << "\n";
    }
  }
  const auto run = read_run(folder / "log.jsonl");
  write_page(run, folder / "report.html");
  EXPECT_EQ(run.steps.size(), static_cast<size_t>(kManySteps));
  EXPECT_LT(std::filesystem::file_size(folder / "report.html"), 400000U);
  const auto data = data_of(run);
  EXPECT_LE(data["loss"]["steps"].size(), 2000U);
  EXPECT_EQ(data["loss"]["steps"].back(), kManySteps);
  EXPECT_GT(data["loss"]["mean"]["steps"].size(), 300U);
  EXPECT_EQ(data["loss"]["mean"]["counts"][0], kManySteps / 450);
}

TEST(PageTest, EverythingAtItsMostStaysBelowThreeMegabytes) {
  std::string text;
  const std::string name(190, 'n');
  nlohmann::json start{
      {"kind", "start"}, {"time", 1}, {"name", name}, {"device", name}};
  for (int i = 0; i < 1200; ++i) {
    start["units"].push_back({{"name", name}, {"parameters", 123456789}});
    start["config"][name + std::to_string(i)] = name;
  }
  nlohmann::json timeline{{"kind", "timeline"}, {"step", 1}};
  for (int rank = 0; rank < 32; ++rank) {
    nlohmann::json spans = nlohmann::json::array();
    for (int i = 0; i < 300; ++i) {
      spans.push_back(
          {{"lane", "gather"},
           {"name", std::to_string(rank * 300 + i) + std::string(75, 's')},
           {"start", i + 0.123456},
           {"end", i + 0.623456}});
    }
    timeline["ranks"].push_back({{"rank", rank}, {"spans", spans}});
  }
  for (int attempt = 0; attempt < 300; ++attempt) {
    text += attempt == 299 ? start.dump() + "\n" : start_line(attempt);
    text += step_lines(attempt * 10, attempt * 10 + 300, 0.123456789);
    text += attempt % 100 == 99 ? timeline.dump() + "\n" : "";
    text +=
        nlohmann::json{
            {"kind", "resume"},
            {"step", attempt},
            {"path", std::string(500, 'r')}}
            .dump() +
        "\n";
    text +=
        nlohmann::json{
            {"kind", "sample"},
            {"step", 1},
            {"prompt", std::string(4000, 'p')},
            {"text", std::string(4000, 's')}}
            .dump() +
        "\n";
    text +=
        nlohmann::json{
            {"kind", "checkpoint"},
            {"step", attempt},
            {"path", std::string(500, 'c')}}
            .dump() +
        "\n";
    text +=
        nlohmann::json{
            {"kind", "end"},
            {"reason", name},
            {"error", std::string(1000, 'e')}}
            .dump() +
        "\n";
  }
  const std::string page = make_page(read_text(text));
  EXPECT_LT(page.size(), 3000000U);
  EXPECT_GT(page.size(), 1000000U);
}

TEST(PageTest, DamagedLogsAreReadOrRejected) {
  const std::string text = start_line() + step_lines(0, 5) +
      R"({"kind":"timeline","step":1,"ranks":[{"rank":0,"spans":[{"lane":"wait","name":"n","start":0,"end":1}]}]})"
      "\n"
      R"({"kind":"start","config":{"a":[1,{"b":"c"}]},"units":[{"name":"u","parameters":1}],"versions":{"x":"1"}})"
      "\n"
      R"({"kind":"sample","step":1,"prompt":"p","text":"t"})"
      "\n"
      R"({"kind":"checkpoint","step":5,"path":"p","blocked_seconds":1})"
      "\n";
  ASSERT_EQ(read_text(text).num_problems, 0); // undamaged
  std::mt19937 random(11);
  int read = 0;
  for (int round = 0; round < 500; ++round) {
    std::string damaged = text;
    for (int i = 0; i < 1 + round % 7; ++i) {
      const size_t place = random() % damaged.size();
      switch (random() % 3) {
        case 0:
          damaged[place] = static_cast<char>(random());
          break;
        case 1:
          damaged.erase(place, random() % 20);
          break;
        default:
          damaged.insert(place, damaged.substr(random() % damaged.size(), 9));
      }
    }
    try {
      const auto run = read_text(damaged);
      EXPECT_NO_THROW(nlohmann::json::parse(page_data(run)));
      ++read;
    } catch (const ReportError&) {
    }
  }
  EXPECT_GT(read, 300);
}

TEST(WritePageTest, LinksStayLinksAndStreamsStreams) {
  const ScratchFolder folder;
  const auto run = read_text(start_line());
  write_file(folder / "target.html", "old");
  std::filesystem::create_symlink("target.html", folder / "link.html");
  write_page(run, folder / "link.html");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link.html"));
  EXPECT_GT(std::filesystem::file_size(folder / "target.html"), 1000U);
  std::filesystem::create_symlink("/dev/null", folder / "nothing.html");
  write_page(run, folder / "nothing.html");
  EXPECT_TRUE(std::filesystem::is_character_file(folder / "nothing.html"));
}

TEST(WritePageTest, ReplacesThePageAndLeavesNothingElse) {
  const ScratchFolder folder;
  write_file(folder / "report.html", "old");
  write_page(read_text(start_line()), folder / "report.html");
  EXPECT_THAT(read_file(folder / "report.html"), HasSubstr("<!DOCTYPE html>"));
  int files = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(folder.path())) {
    ++files;
  }
  EXPECT_EQ(files, 1);
}

TEST(WritePageTest, RejectsAFolderThatIsNotThere) {
  const ScratchFolder folder;
  try {
    write_page(read_text(start_line()), folder / "none/report.html");
    FAIL();
  } catch (const ReportError& error) {
    EXPECT_THAT(
        error.what(), HasSubstr("none/report.html\" cannot be written"));
  }
}

} // namespace
} // namespace tessera::report
