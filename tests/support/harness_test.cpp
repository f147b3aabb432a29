// The harness must notice what tests on ranks can do wrong.
#include <filesystem>
#include <fstream>

#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

CommandResult run_subject(
    const std::string& tests,
    std::vector<std::string> more = {}) {
  std::vector<std::string> words{
      bin_dir() + "/harness_subject", "--gtest_filter=" + tests};
  words.insert(words.end(), more.begin(), more.end());
  return run_command(words);
}

TEST(HarnessTest, APassingTestPasses) {
  const auto result = run_subject("Subject.Passes");
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(HarnessTest, PropertiesOfRankZeroReachTheReport) {
  const auto file = std::filesystem::temp_directory_path() /
      ("tessera_harness_" + std::to_string(getpid()) + ".xml");
  run_subject("Subject.Passes", {"--gtest_output=xml:" + file.string()});
  std::ifstream in(file);
  const std::string xml(std::istreambuf_iterator<char>(in), {});
  std::filesystem::remove(file);
  EXPECT_THAT(xml, HasSubstr("name=\"leaf_runs\" value=\"7\""));
}

TEST(HarnessTest, AFailureOnOneRankFailsTheTest) {
  const auto result = run_subject("Subject.FailsOnRankTwoOnly");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("[rank 2]"),
          HasSubstr("two is bad"),
          HasSubstr("harness_subject.cpp"),
          Not(HasSubstr("[rank 1]"))));
}

TEST(HarnessTest, AnExceptionOnOneRankFailsTheTest) {
  const auto result = run_subject("Subject.ThrowsOnRankOne");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("[rank 1]"), HasSubstr("thrown on purpose")));
}

TEST(HarnessTest, AHangIsKilledInTimeAndSaysWhereEachRankStood) {
  const auto result = run_subject("Subject.HangsOnRankOne");
  EXPECT_EQ(result.exit_code, 1);
  // Three times the limit of the test, not that of the collectives, which is 20
  // s.
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("not all ranks finished within 4.5 s:"),
          HasSubstr("[rank 0] did not finish"),
          HasSubstr("in barrier for \"after\", call #1"),
          HasSubstr("in no collective; the last was barrier for \"before\""),
          HasSubstr("pause")));
}

TEST(HarnessTest, ADeathNamesRankAndSignal) {
  const auto result = run_subject("Subject.IsKilledOnRankZero");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("[rank 0]"), HasSubstr("was killed by Killed")));
}

TEST(HarnessTest, ALeftoverProcessOfARankIsCaught) {
  const auto result = run_subject("Subject.LeaksAProcessOnARank");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("[rank 1]"), HasSubstr("left processes running")));
}

TEST(HarnessTest, ALeftoverProcessOfTheControllerIsCaught) {
  const auto result = run_subject("Subject.LeaksAProcessInTheController");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("left processes running"));
}

TEST(HarnessTest, ACommandTakesAllThatItStartedWithIt) {
  // The ranks are in groups of their own and stop for no signal but SIGKILL.
  for (int i = 0; i < 10; ++i) {
    Command launcher(
        {tessera_program(),
         "run",
         "-n",
         "4",
         "/bin/sh",
         "-c",
         "trap '' TERM; echo ready; sleep 100; :"},
        {.environment = without_launcher()});
    ASSERT_TRUE(launcher.wait_for_output("[3] ready"));
  }
} // The check for processes that are left over follows.

TEST(HarnessTest, ThePoolStartsAnewAfterAFailure) {
  const auto result = run_subject(
      "Subject.IsKilledOnRankZero:Subject.FailsOnRankTwoOnly:"
      "Subject.HangsOnRankOne:Subject.Passes",
      {"--gtest_repeat=2"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("[       OK ] Subject.Passes"),
          Not(HasSubstr("FAILED  ] Subject.Passes"))));
}

} // namespace
} // namespace tessera
