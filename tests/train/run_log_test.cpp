#include <tessera/train/run_log.h>

#include <nlohmann/json.hpp>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "support/warnings.h"
#include "train/log_file.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using Json = nlohmann::ordered_json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> lines_of(const fs::path& path) {
  std::ifstream in(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    lines.push_back(line);
  }
  return lines;
}

std::vector<Json> read(const RunLog& log) {
  std::vector<Json> result;
  for (const std::string& line : lines_of(log.path())) {
    result.push_back(Json::parse(line));
  }
  return result;
}

void append(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::app) << text;
}

TEST(RunLogTest, EveryKindOfLineHasItsFields) {
  const TempFolder folder;
  RunLog log(folder / "run", RunLogOptions().name("demo"));
  const std::vector<UnitInfo> units{{"blocks.0", 123, 492, 246}};
  log.start(
      7,
      {{"lr", 1e-3},
       {"layers", StateList{1, 2}},
       {"deep", StateDict{{"on", true}, {"nothing", nullptr}}},
       {"weight", torch::zeros({2, 3})}},
      units,
      "cpu");
  log.resume(7, folder / "run/checkpoints/step_00000007");
  log.step(
      {.step = 8,
       .loss = 5.5,
       .lr = 1e-4,
       .grad_norm = 1.25,
       .tokens = 2048,
       .seconds = 0.5,
       .memory = MemoryByKind{1, 2, 3, 4, 5, 6},
       .mfu = 0.375,
       .loss_scale = 65536,
       .skipped = true});
  log.step({.step = 9});
  log.eval(9, 4.25);
  log.sample(9, "once", "upon");
  log.checkpoint(9, "elsewhere/step_00000009", 0.25);
  log.timeline(9, {{TimelineLane::Gather, "blocks.0", 0.125, 0.5}});
  log.end(9, "finished");
  auto lines = read(log);
  for (Json& line : lines) {
    EXPECT_GT(line.at("time").get<double>(), 1.7e9);
    line.erase("time");
  }
  ASSERT_EQ(lines.size(), 9);
  EXPECT_FALSE(lines[0].at("host").get<std::string>().empty());
  EXPECT_EQ(lines[0].at("versions").at("tessera"), "0.1.0");
  EXPECT_TRUE(lines[0].at("versions").contains("libtorch"));
  lines[0].erase("host");
  lines[0].erase("versions");
  EXPECT_EQ(
      lines[0].dump(),
      R"({"kind":"start","format":1,"attempt":0,"step":7,"world":1,"device":"cpu","name":"demo",)"
      R"("config":{"lr":0.001,"layers":[1,2],"deep":{"on":true,"nothing":null},"weight":"Float [2, 3]"},)"
      R"("units":[{"name":"blocks.0","parameters":123,"full_bytes":492,"shard_bytes":246}]})");
  EXPECT_EQ(
      lines[1].dump(),
      R"({"kind":"resume","step":7,"path":"checkpoints/step_00000007"})");
  EXPECT_EQ(
      lines[2].dump(),
      R"({"kind":"step","step":8,"loss":5.5,"lr":0.0001,"grad_norm":1.25,"tokens":2048,"seconds":0.5,"mfu":0.375,"loss_scale":65536.0,"skipped":true,)"
      R"("memory":{"shards":1,"full":2,"gradients":3,"optimizer":4,"activations":5,"other":6}})");
  EXPECT_EQ(lines[3].dump(), R"({"kind":"step","step":9})");
  EXPECT_EQ(lines[4].dump(), R"({"kind":"eval","step":9,"loss":4.25})");
  EXPECT_EQ(
      lines[5].dump(),
      R"({"kind":"sample","step":9,"prompt":"once","text":"upon"})");
  EXPECT_EQ(
      lines[6].dump(),
      R"({"kind":"checkpoint","step":9,"path":"elsewhere/step_00000009","blocked_seconds":0.25})");
  EXPECT_EQ(
      lines[7].dump(),
      R"({"kind":"timeline","step":9,"ranks":[{"rank":0,"spans":[{"lane":"gather","name":"blocks.0","start":0.125,"end":0.5}]}]})");
  EXPECT_EQ(lines[8].dump(), R"({"kind":"end","step":9,"reason":"finished"})");
}

TEST(RunLogTest, LossesComeBackBitByBit) {
  const TempFolder folder;
  RunLog log(folder.path());
  torch::manual_seed(0);
  const at::Tensor losses = torch::randn({500}, at::kDouble).exp();
  for (int i = 0; i < losses.numel(); ++i) {
    log.step({.step = i, .loss = losses[i].item<double>()});
  }
  const auto lines = read(log);
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(
        lines[i].at("loss").get<double>(),
        losses[static_cast<int64_t>(i)].item<double>());
  }
}

TEST(RunLogTest, NumbersThatAreNotFiniteAreWords) {
  const TempFolder folder;
  RunLog log(folder.path());
  const double infinity = std::numeric_limits<double>::infinity();
  log.step({.step = 1, .loss = std::nan(""), .lr = infinity});
  log.eval(1, -infinity);
  const auto lines = read(log);
  EXPECT_EQ(lines[0].at("loss"), "nan");
  EXPECT_EQ(lines[0].at("lr"), "inf");
  EXPECT_EQ(lines[1].at("loss"), "-inf");
}

TEST(RunLogTest, BytesThatAreNotUtf8AreReplaced) {
  const TempFolder folder;
  RunLog log(folder.path());
  log.sample(
      1,
      "a\xff"
      "b\n",
      "\xe2\x82");
  const auto lines = read(log);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_EQ(
      lines[0].at("prompt"),
      "a\xEF\xBF\xBD"
      "b\n");
  EXPECT_EQ(lines[0].at("text"), "\xEF\xBF\xBD");
}

TEST(RunLogTest, JsonIsWrittenOnOneLineAndOtherTextIsRefused) {
  const TempFolder folder;
  RunLog log(folder.path());
  log.start_with_json(0, "{\n \"b\": 1,\n \"a\": [true]\n}", {}, "cpu");
  EXPECT_EQ(read(log).at(0).at("config").dump(), R"({"b":1,"a":[true]})");
  EXPECT_EQ(read(log).at(0).at("name"), folder.path().filename().string());
  EXPECT_THAT(
      error_of([&] { log.start_with_json(0, "{", {}, "cpu"); }),
      HasSubstr("not JSON"));
}

TEST(RunLogTest, ARestartAppendsAndCountsAttempts) {
  const TempFolder folder;
  for (int attempt = 0; attempt < 3; ++attempt) {
    RunLog log(folder.path());
    EXPECT_EQ(log.attempt(), attempt);
    log.start(10 * attempt, {}, {}, "cpu");
    log.sample(1, "", R"({"kind":"start",)"); // no line of its own
    EXPECT_EQ(read(log).back().at("kind"), "sample");
    EXPECT_EQ(
        read(log)[2 * static_cast<size_t>(attempt)].at("attempt"), attempt);
  }
}

TEST(RunLogTest, ARunIsCalledAfterItsFolder) {
  const TempFolder folder;
  for (const char* end : {"", "/"}) {
    RunLog log(folder / (std::string("seven") + end));
    log.start(0, {}, {}, "cpu");
    log.resume(0, folder / "seven/checkpoints");
    EXPECT_EQ(read(log).end()[-2].at("name"), "seven");
    EXPECT_EQ(read(log).back().at("path"), "checkpoints");
  }
}

TEST(RunLogTest, ATornLineStaysAloneAndIsNoStart) {
  const TempFolder folder;
  const fs::path path = folder / "log.jsonl";
  {
    RunLog log(folder.path());
    log.start(0, {}, {}, "cpu");
  }
  append(path, R"({"kind":"start","time":17)");
  RunLog log(folder.path());
  EXPECT_EQ(log.attempt(), 1);
  log.start(3, {}, {}, "cpu");
  log.eval(4, 1.0);
  const auto lines = lines_of(path);
  ASSERT_EQ(lines.size(), 4);
  EXPECT_EQ(lines[1], R"({"kind":"start","time":17)");
  EXPECT_EQ(Json::parse(lines[2]).at("attempt"), 1);
  EXPECT_EQ(Json::parse(lines[3]).at("loss"), 1.0);
}

TEST(RunLogTest, AKillLeavesWholeLines) {
  const TempFolder folder;
  const fs::path path = folder / "log.jsonl";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    train::LogFile file(path);
    for (int64_t step = 0;; ++step) {
      file.append(
          "{\"step\":" + std::to_string(step) + ",\"pad\":\"" +
          std::string(200, 'x') + "\"}");
    }
  }
  while (!fs::exists(path) || fs::file_size(path) < 100000) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  { // what a restart does
    train::LogFile file(path);
    file.append(R"({"step":-1})");
  }
  const auto lines = lines_of(path);
  size_t num_torn = 0;
  for (size_t i = 0; i + 1 < lines.size(); ++i) {
    const Json line = Json::parse(lines[i], nullptr, false);
    if (line.is_discarded()) {
      ++num_torn;
      EXPECT_EQ(i + 2, lines.size());
    } else {
      EXPECT_EQ(line.at("step").get<size_t>(), i);
    }
  }
  EXPECT_LE(num_torn, 1);
  EXPECT_EQ(lines.back(), R"({"step":-1})");
}

TEST(RunLogTest, AFullDiskIsWarnedOfOnceAndTrainingGoesOn) {
  const TempFolder folder;
  fs::create_symlink("/dev/full", folder / "log.jsonl");
  const Warnings warnings;
  RunLog log(folder.path());
  EXPECT_TRUE(log.is_writing());
  for (int step = 0; step < 3; ++step) {
    log.step({.step = step});
    log.timeline(step, {});
  }
  EXPECT_FALSE(log.is_writing());
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_THAT(warnings.texts[0], HasSubstr("log.jsonl"));
  EXPECT_THAT(warnings.texts[0], HasSubstr("No space left"));
  EXPECT_THAT(warnings.texts[0], HasSubstr("Training continues"));
}

TEST(RunLogTest, AFolderThatCannotBeMadeIsWarnedOf) {
  const TempFolder folder;
  append(folder / "run", "a file is in the way");
  const Warnings warnings;
  RunLog log(folder / "run");
  EXPECT_FALSE(log.is_writing());
  log.step({.step = 1});
  EXPECT_EQ(warnings.texts.size(), 1);
}

TEST(RunLogTest, Rank0WritesForAllRanks) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    const auto rank = world.rank();
    RunLog log(folder / "run");
    EXPECT_EQ(log.is_writing(), rank == 0);
    log.start(0, {}, {}, "cpu");
    // Rank 1 has the most.
    log.step_of_all(
        {.step = 1, .loss = rank, .memory = MemoryByKind{.shards = 10 + rank}});
    log.step_of_all({.step = 2, .loss = rank});
    log.timeline(2, {{TimelineLane::Wait, "of " + std::to_string(rank), 0, 1}});
    world.barrier();
    const auto lines = read(log);
    ASSERT_EQ(lines.size(), 4);
    EXPECT_EQ(lines[0].at("world"), 2);
    EXPECT_EQ(lines[1].at("memory").at("shards"), 11);
    EXPECT_EQ(lines[1].at("loss"), 0.0);
    EXPECT_FALSE(lines[2].contains("memory"));
    const Json& ranks = lines[3].at("ranks");
    ASSERT_EQ(ranks.size(), 2);
    for (int one = 0; one < 2; ++one) {
      EXPECT_EQ(ranks[one].at("rank"), one);
      EXPECT_EQ(
          ranks[one].at("spans").at(0).at("name"), "of " + std::to_string(one));
    }
  });
}

} // namespace
} // namespace tessera
