// The trainer as a user runs it: killed, resumed, on other numbers of ranks.
#include <nlohmann/json.hpp>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "examples/gpt_fixture.h"
#include "support/command.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class GptStrategyTest : public GptTest,
                        public ::testing::WithParamInterface<const char*> {};

TEST_P(GptStrategyTest, ResumesBitByBitOnAsManyRanks) {
  // Dropout needs every rank's generator, two rows at once the accumulation.
  const Words flags{
      "--strategy", GetParam(), "--dropout", "0.1", "--micro-batch", "2"};
  must_train(2, "whole", flags);
  must_die_and_resume(2, 2, "resumed", flags, flags);
  expect_same_bits("resumed", "whole");
  // The steps that were made twice are the same, too.
  std::map<int64_t, std::set<double>> by_step;
  for (const auto& entry : log("resumed", "step")) {
    by_step[entry.at("step")].insert(entry.at("loss").get<double>());
  }
  for (const auto& [step, values] : by_step) {
    EXPECT_EQ(values.size(), 1) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Strategies,
    GptStrategyTest,
    ::testing::Values("fsdp", "ddp", "zero"),
    [](const auto& strategy) { return std::string(strategy.param); });

TEST_F(GptTest, ARankThatLeavesAStepOutEndsTheRunOnAllRanks) {
  const auto result = train(2, "skipped", {"--skip-at", "3"});
  EXPECT_NE(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("rank 0: step 3"));
  EXPECT_THAT(result.output, HasSubstr("rank 1: step 4"));
  EXPECT_EQ(losses("skipped").size(), 2u);
}

TEST_F(GptTest, ResumesOnOtherRanksUnderAnotherStrategy) {
  must_train(2, "whole");
  must_die_and_resume(2, 4, "on4", {}, {});
  expect_near("on4", "whole");
  must_die_and_resume(4, 1, "on1", {"--strategy", "ddp"}, {});
  expect_near("on1", "whole");
  must_die_and_resume(1, 2, "zero", {}, {"--strategy", "zero"});
  expect_near("zero", "whole");
}

TEST_F(GptTest, TheBatchIsTheSameHoweverItIsCut) {
  must_train(1, "one");
  must_train(2, "two", {"--micro-batch", "1"});
  expect_near("two", "one");
  EXPECT_NEAR(
      log("one", "eval").back().at("loss").get<double>(),
      log("two", "eval").back().at("loss").get<double>(),
      1e-4);
}

TEST_F(GptTest, RecomputingChangesMemoryAndNoBit) {
  must_train(2, "kept", {"--dropout", "0.1"});
  must_train(2, "recomputed", {"--dropout", "0.1", "--recompute"});
  expect_same_bits("recomputed", "kept");
  const auto activations = [&](const std::string& run) {
    return log(run, "step").at(1).at("memory").at("activations").get<int64_t>();
  };
  EXPECT_LT(activations("recomputed"), 0.7 * activations("kept"));
}

TEST_F(GptTest, ALossInChunksIsTheSameLoss) {
  must_train(2, "logits");
  for (const char* strategy : {"fsdp", "zero"}) {
    const std::string run = std::string("chunks_") + strategy;
    must_train(2, run, {"--chunked-loss", "--strategy", strategy});
    expect_near(run, "logits");
  }
}

/// On a CPU a captured step is the plain one; here with accumulation.
TEST_F(GptTest, CaptureOnACpuTrainsAsWithoutIt) {
  must_train(2, "eager", {"--micro-batch", "2"});
  must_train(2, "captured", {"--micro-batch", "2", "--capture"});
  expect_same_bits("captured", "eager");
}

TEST_F(GptTest, OptionsOfShardingTrainToo) {
  must_train(2, "plain");
  must_train(2, "kept", {"--keep-gathered"});
  expect_same_bits("kept", "plain");
  for (const char* strategy : {"fsdp", "zero"}) {
    const std::string run = std::string("bf16_") + strategy;
    must_train(2, run, {"--precision", "bf16", "--strategy", strategy});
    const auto found = losses(run);
    const auto expected = losses("plain");
    EXPECT_NE(found.at(12), expected.at(12));
    EXPECT_NEAR(found.at(12), expected.at(12), 0.1);
  }
}

TEST_F(GptTest, LearnsFromPairsAndWritesText) {
  must_train(
      2,
      "bpe",
      {"--tokenizer",
       "bpe",
       "--vocabulary",
       "300",
       "--steps",
       "40",
       "--lr",
       "5e-3"});
  const auto found = losses("bpe");
  EXPECT_LT(found.at(40), 0.7 * found.at(1));
  EXPECT_EQ(log("bpe", "sample").size(), 1);
  const auto sampled = train(
      2,
      "bpe",
      {"--mode",
       "sample",
       "--tokenizer",
       "bpe",
       "--vocabulary",
       "300",
       "--prompt",
       "7 plus"});
  EXPECT_EQ(sampled.exit_code, 0) << sampled.output;
  EXPECT_THAT(sampled.output, HasSubstr("| 7 plus"));
  const auto evaluated = train(
      1,
      "bpe",
      {"--mode", "eval", "--tokenizer", "bpe", "--vocabulary", "300"});
  EXPECT_THAT(evaluated.output, HasSubstr("step 40: validation loss"));
}

TEST_F(GptTest, ASignalEndsItWithACheckpoint) {
  Command command(
      words(2, "stopped", {"--steps", "100000", "--eval-every", "0"}),
      {.environment = without_launcher()});
  ASSERT_TRUE(command.wait_for_output("GPT of"));
  while (losses("stopped").empty()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ::kill(command.pid(), SIGTERM);
  const auto result = command.wait();
  const auto ends = log("stopped", "end");
  ASSERT_EQ(ends.size(), 1) << result.output;
  EXPECT_EQ(ends[0].at("reason"), "stopped");
  const auto saves = log("stopped", "checkpoint");
  EXPECT_EQ(saves.back().at("step"), ends[0].at("step"));
}

TEST_F(GptTest, LeavesALogAReportAndATrace) {
  must_train(2, "run", {"--timeline-step", "3", "--trace", "5-6"});
  const auto start = log("run", "start").at(0);
  EXPECT_EQ(start.at("world"), 2);
  EXPECT_EQ(start.at("units").size(), 3);
  EXPECT_EQ(start.at("config").at("model").at("width"), 32);
  EXPECT_EQ(log("run", "timeline").at(0).at("ranks").size(), 2);
  EXPECT_EQ(log("run", "checkpoint").size(), 3);
  EXPECT_GT(log("run", "step").at(1).at("memory").at("optimizer"), 0);
  EXPECT_TRUE(fs::exists(folder_ / "run" / "report.html"));
  for (const char* name : {"rank0.json", "rank1.json"}) {
    std::ifstream file(folder_ / "run" / "trace" / name);
    EXPECT_NO_THROW(json::parse(file)) << name;
  }
}

TEST_F(GptTest, RefusesWhatCannotBeMeant) {
  const auto refuses = [&](const Words& flags, const std::string& why) {
    const auto result = train(2, "refused", flags);
    EXPECT_EQ(result.exit_code, 2) << result.output;
    // Only rank 0 prints it.
    EXPECT_THAT(
        result.output, AllOf(HasSubstr(why), Not(HasSubstr("[1] gpt:"))));
  };
  refuses({"--stpes", "3"}, "--steps meant");
  refuses({"--resume", "must"}, "no checkpoint to resume");
  must_train(2, "refused", {"--steps", "4"});
  refuses({"--resume", "never"}, "earlier run");
}

TEST_F(GptTest, AnErrorOfRankZeroIsEverybodys) {
  const auto result = train(2, "none", {"--text", "/nowhere"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("/nowhere"));
}

TEST_F(GptTest, OneProcessTrainsInARunAtATime) {
  Command first(
      words(2, "run", {"--steps", "100000"}),
      {.environment = without_launcher()});
  ASSERT_TRUE(first.wait_for_output("GPT of"));
  const auto second = train(1, "run");
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.output, HasSubstr("another process is training in"));
  ::kill(first.pid(), SIGTERM);
  EXPECT_EQ(first.wait().exit_code, 128 + SIGTERM);
}

TEST_F(GptTest, WhatIsNotFiniteIsNeitherUsedNorSaved) {
  const auto explode = [&](const std::string& run, const char* save_every) {
    return train(
        2,
        run,
        {"--lr",
         "1e38",
         "--min-lr",
         "0",
         "--warmup",
         "2",
         "--checkpoint-every",
         save_every});
  };
  const auto result = explode("nan", "1");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output, HasSubstr("parameters are not finite after step 1"));
  EXPECT_TRUE(fs::is_empty(folder_ / "nan" / "checkpoints"));
  const auto ends = log("nan", "end");
  ASSERT_EQ(ends.size(), 1);
  EXPECT_EQ(ends[0].at("reason"), "failed");
  EXPECT_THAT(ends[0].at("error"), HasSubstr("not finite"));
  // If nothing is saved, the next gradients show it.
  const auto unsaved = explode("unsaved", "0");
  EXPECT_EQ(unsaved.exit_code, 1);
  EXPECT_THAT(
      unsaved.output, HasSubstr("the gradients of step 2 are not finite"));
  EXPECT_EQ(losses("unsaved").size(), 1);
}

TEST_F(GptTest, APageThatCannotBeMadeDoesNotUndoTheTraining) {
  fs::create_directories(folder_ / "run" / "report.html" / "in_the_way");
  const auto result = train(2, "run", {"--trace", "20-22"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("no report: "), Not(HasSubstr("trace: "))));
  ASSERT_EQ(log("run", "end").size(), 1);
  EXPECT_EQ(log("run", "end")[0].at("reason"), "finished");
  const auto evaluated = train(3, "run", {"--mode", "eval"});
  EXPECT_THAT(evaluated.output, HasSubstr("step 12: validation loss"));
}

TEST_F(GptTest, TheDemoInShort) {
  const auto root = fs::path(bin_dir()).parent_path();
  const auto result = run_command(
      {"python3",
       TESSERA_EXAMPLES "/gpt/demo.py",
       "--build",
       root.string(),
       "--run",
       (folder_ / "demo").string(),
       "--steps",
       "40"},
      {.environment = without_launcher(), .timeout = std::chrono::minutes(10)});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("That was meant: --die-at 19"),
          HasSubstr("resumed from step 16"),
          HasSubstr("o 2 ranks, x 4 ranks"),
          HasSubstr("Steps 17 to 19 were made twice"),
          HasSubstr("report.html"),
          HasSubstr("docs/tutorial.md")));
}

TEST_F(GptTest, TheStoriesOfTheDemoAreThoseOfTheirScript) {
  const auto made = run_command(
      {"python3", TESSERA_EXAMPLES "/gpt/make_stories.py"},
      {.environment = without_launcher()});
  ASSERT_EQ(made.exit_code, 0) << made.output;
  std::ifstream file(TESSERA_EXAMPLES "/gpt/stories.txt");
  std::stringstream stories;
  stories << file.rdbuf();
  EXPECT_GT(stories.str().size(), 300'000u);
  EXPECT_EQ(made.output, stories.str());
}

} // namespace
} // namespace tessera
