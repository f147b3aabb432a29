// Runs the trainer as a user does, on a text of its own.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "support/command.h"

namespace tessera::testing {

using Words = std::vector<std::string>;

class GptTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSteps = 12;

  GptTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ / "text");
    // Learnable, and never the same line twice.
    std::ofstream text(folder_ / "text" / "numbers.txt");
    for (int i = 0; i < 2000; ++i) {
      text << i << " plus " << i << " is " << 2 * i << "\n";
    }
  }
  ~GptTest() override {
    std::filesystem::remove_all(folder_);
  }

  /// What it learns from.
  virtual Words data() {
    return {"--text", (folder_ / "text").string()};
  }
  /// The model that is trained.
  virtual Words model() {
    return {"--layers", "2", "--width", "32", "--length", "16"};
  }

  Words words(int num_ranks, const std::string& run, const Words& flags) {
    Words words{
        tessera_program(),
        "run",
        "-n",
        std::to_string(num_ranks),
        "--cpu-threads",
        "1",
        bin_dir() + "/gpt",
        "--run",
        (folder_ / run).string()};
    for (const Words& some : {data(), model()}) {
      words.insert(words.end(), some.begin(), some.end());
    }
    for (const char* word :
         {"--batch",
          "8",
          "--warmup",
          "3",
          "--device",
          "cpu",
          "--steps",
          "12",
          "--eval-every",
          "6",
          "--sample-tokens",
          "5",
          "--checkpoint-every",
          "4"}) {
      words.emplace_back(word);
    }
    words.insert(words.end(), flags.begin(), flags.end());
    return words;
  }
  CommandResult train(
      int num_ranks,
      const std::string& run,
      const Words& flags = {}) {
    return run_command(
        words(num_ranks, run, flags), {.environment = without_launcher()});
  }
  /// The same on one rank, without a launcher.
  CommandResult train_alone(const std::string& run, const Words& flags = {}) {
    Words all = words(1, run, flags);
    const auto program = std::find(all.begin(), all.end(), bin_dir() + "/gpt");
    return run_command(
        Words(program, all.end()), {.environment = without_launcher()});
  }
  void must_train(
      int num_ranks,
      const std::string& run,
      const Words& flags = {}) {
    const auto result = train(num_ranks, run, flags);
    ASSERT_EQ(result.exit_code, 0) << result.output;
  }
  /// The weights of a checkpoint, as a safetensors file.
  static CommandResult convert_model(
      const std::filesystem::path& checkpoint,
      const std::filesystem::path& to) {
    return run_command(
        {tessera_program(),
         "ckpt",
         "convert",
         checkpoint.string(),
         to.string(),
         "--to",
         "safetensors",
         "--select",
         "model",
         "--strip-prefix",
         "model"},
        {.environment = without_launcher()});
  }
  /// Dies in the middle, then resumes and runs to the end.
  void must_die_and_resume(
      int num_ranks,
      int num_ranks_after,
      const std::string& run,
      const Words& flags,
      const Words& flags_after) {
    Words dying = flags;
    // Saved before it dies, whatever the disk does.
    dying.insert(dying.end(), {"--die-at", "7", "--wait-for-saves"});
    const auto died = train(num_ranks, run, dying);
    ASSERT_EQ(died.exit_code, 128 + SIGKILL) << died.output;
    Words resuming = flags_after;
    resuming.insert(resuming.end(), {"--resume", "must"});
    const auto resumed = train(num_ranks_after, run, resuming);
    ASSERT_EQ(resumed.exit_code, 0) << resumed.output;
    EXPECT_THAT(resumed.output, ::testing::HasSubstr("resumed from step 4"));
  }

  std::vector<nlohmann::json> log(
      const std::string& run,
      const std::string& kind) {
    std::vector<nlohmann::json> entries;
    std::ifstream file(folder_ / run / "log.jsonl");
    for (std::string line; std::getline(file, line);) {
      auto entry = nlohmann::json::parse(line);
      if (entry.at("kind") == kind) {
        entries.push_back(std::move(entry));
      }
    }
    return entries;
  }
  /// The loss of each step, the last time that it was made.
  std::map<int64_t, double> losses(const std::string& run) {
    std::map<int64_t, double> losses;
    for (const auto& entry : log(run, "step")) {
      losses[entry.at("step")] = entry.at("loss");
    }
    return losses;
  }

  void expect_same_bits(const std::string& run, const std::string& other) {
    ASSERT_EQ(losses(run).size(), kSteps);
    EXPECT_EQ(losses(run), losses(other)); // bit by bit
  }
  void expect_near(const std::string& run, const std::string& other) {
    const auto found = losses(run);
    const auto expected = losses(other);
    ASSERT_EQ(found.size(), kSteps);
    ASSERT_EQ(expected.size(), kSteps);
    for (const auto& [step, loss] : expected) {
      EXPECT_NEAR(found.at(step), loss, 1e-4 * loss) << "step " << step;
    }
  }

  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) /
      ("gpt_test_" + std::to_string(::getpid()));
};

} // namespace tessera::testing
