// `tessera run` as a user meets it; supervision itself is tested in launch/.
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <cstdlib>

#include "support/command.h"

namespace tessera {
namespace {

using tessera::testing::bin_dir;
using tessera::testing::Command;
using tessera::testing::CommandOptions;
using tessera::testing::CommandResult;
using tessera::testing::run_command;
using tessera::testing::tessera_program;
using tessera::testing::without_launcher;
using ::testing::AllOf;
using ::testing::HasSubstr;

CommandResult run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {tessera_program(), "run"});
  return run_command(arguments, {.environment = without_launcher()});
}

TEST(RunTest, PassesArgumentsOnAsTheyAre) {
  const auto result =
      run({"-n", "2", "/bin/echo", "--lr", "1e-3", "-n", "--", "x y"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("[0] --lr 1e-3 -n -- x y\n"),
          HasSubstr("[1] --lr 1e-3 -n -- x y\n")));
  EXPECT_THAT(
      run({"-n", "1", "--", "/bin/echo", "-v"}).output, HasSubstr("[0] -v\n"));
  EXPECT_THAT(
      run({"-n1", "--", "/bin/echo", "-v"}).output, HasSubstr("[0] -v\n"));
}

TEST(RunTest, ReturnsTheExitCodeOfTheFirstFailure) {
  const auto result =
      run({"-n", "3", "/bin/sh", "-c", "test $RANK != 1 || exit 7; sleep 20"});
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_LT(result.seconds, 8);
  EXPECT_THAT(result.output, HasSubstr("rank 1 failed first"));
}

TEST(RunTest, RestartsAndTheRanksMeetAgain) {
  const auto result = run(
      {"-n",
       "2",
       "--max-restarts",
       "2",
       "/bin/sh",
       "-c",
       "test $TORCHELASTIC_RESTART_COUNT = 1 || exit 5; exec \"$0\" all_reduce",
       bin_dir() + "/comm_probe"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("restarting (1 of 2)"),
          HasSubstr("[0] sum=3 world=2"),
          HasSubstr("[1] sum=3 world=2")));
}

TEST(RunTest, ASignalReachesTheRanks) {
  CommandOptions options{.environment = without_launcher()};
  Command launcher(
      {tessera_program(),
       "run",
       "-n",
       "2",
       "/bin/sh",
       "-c",
       "trap 'echo caught; exit 0' TERM; echo ready; while :; do sleep 0.05; done"},
      options);
  ASSERT_TRUE(launcher.wait_for_output("[0] ready"));
  ASSERT_TRUE(launcher.wait_for_output("[1] ready"));
  kill(launcher.pid(), SIGTERM);
  const auto result = launcher.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(
      result.output, AllOf(HasSubstr("[0] caught"), HasSubstr("[1] caught")));
}

TEST(RunTest, ARankWaitsForADebuggerWhenAsked) {
  CommandOptions options{.environment = without_launcher()};
  options.environment["TESSERA_DEBUG_RANK"] = "1";
  Command launcher(
      {tessera_program(), "run", "-n", "2", bin_dir() + "/comm_probe"},
      options);
  const std::string words = "rank 1 waits for a debugger: gdb -p ";
  ASSERT_TRUE(launcher.wait_for_output(words));
  ASSERT_TRUE(launcher.wait_for_output("\n"));
  const size_t at = launcher.output().find(words) + words.size();
  const pid_t rank = std::atoi(launcher.output().c_str() + at);
  ASSERT_EQ(ptrace(PTRACE_SEIZE, rank, nullptr, nullptr), 0);
  ASSERT_TRUE(launcher.wait_for_output("[1] sum=3"));
  waitpid(rank, nullptr, __WALL); // its launcher hears of the end after us
  const auto result = launcher.wait();
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(CommandTest, NamesTheCommandsThatThereAre) {
  auto result = run_command({tessera_program(), "repot"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(
      result.output,
      "tessera: there is no command \"repot\". Did you mean \"report\"? There "
      "are ckpt, doctor, plan, report, run; `tessera COMMAND --help` says "
      "more.\n");
  result = run_command({tessera_program()});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("doctor"));
}

TEST(RunTest, RejectsWhatCannotBeRun) {
  auto result = run({"-n", "0", "/bin/true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("tessera run:"));
  result = run({"-n", "2"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("no program was given"));
  result = run({"-n", "2", "--nnodes", "2", "/bin/true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("--rdzv-endpoint HOST:PORT"));
  result = run({"--nnodes", "2", "--rdzv-endpoint", "host", "/bin/true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("\"host\" is not HOST:PORT"));
  result = run({"-n", "2", "--bogus", "/bin/true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("there is no option --bogus"));
  result = run({"--tee", "/bin/true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("--tee goes with --log-dir"));
  result = run({"--rdzv-endpoint", "a:1", "/bin/true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("--rdzv-endpoint is for several nodes"));
  result = run({"--cpu-threads", "0", "/bin/true"});
  EXPECT_EQ(result.exit_code, 2);
  result = run({"-n", "1", "/no/such/program"});
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.output, HasSubstr("/no/such/program"));
}

TEST(RunTest, GivesEachRankItsShareOfTheCores) {
  CommandOptions options{.environment = without_launcher()};
  options.environment["OMP_NUM_THREADS"] = std::nullopt;
  auto result = run_command(
      {tessera_program(),
       "run",
       "-n",
       "64",
       "/bin/sh",
       "-c",
       "echo t=$OMP_NUM_THREADS"},
      options);
  EXPECT_THAT(result.output, HasSubstr("[63] t=1\n"));
  result = run_command(
      {tessera_program(),
       "run",
       "--cpu-threads",
       "3",
       "/bin/sh",
       "-c",
       "echo t=$OMP_NUM_THREADS"},
      options);
  EXPECT_THAT(result.output, HasSubstr("[0] t=3\n"));
}

} // namespace
} // namespace tessera
