// What `make demo` runs, in short, by its exit code.
#include "support/command.h"

namespace tessera {
namespace {

using tessera::testing::bin_dir;
using tessera::testing::CommandResult;
using tessera::testing::run_command;
using tessera::testing::tessera_program;
using tessera::testing::without_launcher;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

CommandResult run_demo(
    const std::string& num_ranks,
    const std::vector<std::string>& flags) {
  std::vector<std::string> words{
      tessera_program(), "run", "-n", num_ranks, bin_dir() + "/demo"};
  words.insert(words.end(), flags.begin(), flags.end());
  return run_command(words, {.environment = without_launcher()});
}

TEST(DemoTest, TwoRanksMatchTheSingleProcess) {
  const auto result = run_demo("2", {"--steps", "12"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("ok: losses differ"),
          HasSubstr("ok: the loss fell"),
          Not(HasSubstr("\r"))));
}

TEST(DemoTest, ThreeRanksThatDivideNothingEvenlyMatchToo) {
  const auto result = run_demo(
      "3",
      {"--steps", "24", "--batch", "3", "--width", "44", "--length", "33"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(DemoTest, LossesFurtherApartThanAllowedFail) {
  const auto result = run_demo("2", {"--steps", "12", "--tolerance", "1e-12"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("WRONG: losses differ"));
}

TEST(DemoTest, ALossThatDoesNotFallFails) {
  const auto result = run_demo("2", {"--steps", "1"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("WRONG: the loss did not fall"));
}

TEST(DemoTest, RejectsWhatItDoesNotKnow) {
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{"--stpes", "12"},
        {"--steps"},
        {"--steps", "0"},
        {"--steps", "12x"},
        {"--batch", "7"},
        {"--width", "130"},
        {"12"}}) {
    const auto result = run_demo("2", flags);
    EXPECT_EQ(result.exit_code, 2) << result.output;
    EXPECT_THAT(result.output, HasSubstr("usage:"));
  }
  EXPECT_EQ(run_demo("2", {"--text", "/nowhere"}).exit_code, 1);
}

} // namespace
} // namespace tessera
