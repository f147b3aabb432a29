// `tessera plan` of an exported program, as users run it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>
#include <vector>

#include "support/command.h"

namespace tessera::plan {
namespace {

using nlohmann::json;
using tessera::testing::CommandResult;
using tessera::testing::run_command;
using tessera::testing::tessera_program;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

CommandResult run_program_plan(const std::vector<std::string>& words) {
  std::vector<std::string> command{
      tessera_program(), "plan", TESSERA_EXPORTED_DATA "/tiny_llama_like.pt2"};
  command.insert(command.end(), words.begin(), words.end());
  return run_command(command);
}

json program_plan(std::vector<std::string> words) {
  words.emplace_back("--json");
  const CommandResult result = run_program_plan(words);
  EXPECT_LE(result.exit_code, 1) << result.output;
  return json::parse(result.output);
}

int64_t activations_of(const json& plan) {
  return plan["device_memory"]["highest"]["activations"].get<int64_t>();
}

TEST(PlanProgramCommandTest, KnowsTheActivationsAndSaysWhatItAssumed) {
  const CommandResult result = run_program_plan({});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("saved for backward, and temporaries"),
          HasSubstr(": the sample of the export"),
          HasSubstr(
              "the loss: a cross-entropy of the result \"logits\", in float32"),
          Not(HasSubstr("not known")),
          Not(HasSubstr("without a rule"))));
}

TEST(PlanProgramCommandTest, BatchAndLengthAreThoseOfTheRun) {
  const json one = program_plan({"--batch", "2", "--length", "32"});
  const json more = program_plan({"--batch", "8", "--length", "32"});
  EXPECT_TRUE(one["knows_activations"]);
  EXPECT_GT(activations_of(more), 3 * activations_of(one));
  EXPECT_LT(activations_of(more), 5 * activations_of(one));
  const json again =
      program_plan({"--batch", "8", "--length", "32", "--recompute"});
  EXPECT_LT(again["at_rest"], more["device_memory"]["at_peak"]);
  EXPECT_LT(activations_of(again), activations_of(more));
}

TEST(PlanProgramCommandTest, SaysWhatFitsAndWhatWouldHelp) {
  const json fits =
      program_plan({"--batch", "2", "--length", "32", "--memory", "4MB"});
  EXPECT_TRUE(fits["fit"]["fits"]);
  EXPECT_EQ(fits["fit"]["grows"], "batch");
  const auto largest = fits["fit"]["largest"].get<int64_t>();
  EXPECT_GT(largest, 2);
  const auto with_batch = [](int64_t batch) {
    return program_plan(
        {"--batch",
         std::to_string(batch),
         "--length",
         "32",
         "--memory",
         "4MB"})["fit"];
  };
  EXPECT_TRUE(with_batch(largest)["fits"]);
  const json too_much = with_batch(largest + 1);
  EXPECT_FALSE(too_much["fits"]);
  std::vector<std::string> flags;
  for (const json& suggestion : too_much["suggestions"]) {
    flags.push_back(suggestion["flags"]);
  }
  EXPECT_THAT(
      flags,
      ::testing::Contains(
          "--batch 1 --accumulate " + std::to_string(largest + 1)));
}

TEST(PlanProgramCommandTest, TheProgramTellsHowMuchIsComputed) {
  const json plan =
      program_plan({"--batch", "2", "--length", "32", "--tflops", "0.001"});
  const double forward_and_backward = plan["seconds"]["computing"];
  // 2 * 32 tokens, 28.8 k parameters, 2 operations in forward and 4 in
  // backward; and attention.
  EXPECT_GT(forward_and_backward, 64 * 28'000 * 6 / 1e9);
  EXPECT_LT(forward_and_backward, 64 * 40'000 * 6 / 1e9);
}

TEST(PlanProgramCommandTest, GivenActivationsTakeItsPlace) {
  const json plan = program_plan({"--activations", "500MB"});
  EXPECT_EQ(activations_of(plan), 500'000'000);
}

TEST(PlanProgramCommandTest, RejectsWithReasons) {
  const auto refusal = [](const std::vector<std::string>& words) {
    const CommandResult result = run_program_plan(words);
    EXPECT_EQ(result.exit_code, 2) << result.output;
    return result.output;
  };
  EXPECT_THAT(
      refusal({"--layers", "2"}),
      HasSubstr("An exported program takes --batch, --length, --recompute"));
  EXPECT_THAT(
      refusal({"--activations", "1MB", "--batch", "2"}),
      HasSubstr("unless --activations is given"));
  EXPECT_THAT(
      refusal({"--length", "1000000"}),
      HasSubstr("--length is 1000000: the program was exported for 2 to"));
  EXPECT_THAT(
      refusal({"--tokens", "10", "--tflops", "1"}),
      HasSubstr("the program itself tells how much is computed"));
}

} // namespace
} // namespace tessera::plan
