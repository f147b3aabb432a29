// `tessera run` as a user meets it; supervision itself is tested in launch/.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
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
      run({"-n", "3", "/bin/sh", "-c", "test $RANK != 1 || exit 7; sleep 600"});
  EXPECT_EQ(result.exit_code, 7);
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
  waitpid(rank, nullptr, __WALL); // its launcher learns of the end after us
  const auto result = launcher.wait();
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(CommandTest, NamesTheCommandsThatThereAre) {
  auto result = run_command({tessera_program(), "repot"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(
      result.output,
      "tessera: there is no command \"repot\". Did you mean \"report\"? There "
      "are ckpt, completion, doctor, man, plan, report, run; `tessera COMMAND "
      "--help` says more.\n");
  result = run_command({tessera_program()});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("doctor"));
}

TEST(CommandTest, NamesTheNearestWordThatACommandKnows) {
  auto result = run_command({tessera_program(), "plan", "--layer", "3"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(
      result.output,
      "tessera plan: \"--layer\" was not expected. Did you mean \"--layers\"? "
      "`tessera plan --help` says more.\n");
  result = run_command({tessera_program(), "ckpt", "inpsect", "x"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(
      result.output,
      HasSubstr(
          "tessera ckpt: \"inpsect\" was not expected. Did you mean \"inspect\"?"));
  result = run_command({tessera_program(), "report"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("tessera report: RUN is required"));
}

/// A port that was free a moment ago.
std::string free_endpoint() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  const bool ok =
      ::bind(fd, raw, size) == 0 && ::getsockname(fd, raw, &size) == 0;
  ::close(fd);
  return ok ? "127.0.0.1:" + std::to_string(ntohs(address.sin_port)) : "";
}

std::unique_ptr<Command> start_node(
    int node,
    const std::string& endpoint,
    const std::vector<std::string>& more) {
  auto words = run_on_node_of_two(node, endpoint);
  words.insert(words.end(), more.begin(), more.end());
  return std::make_unique<Command>(
      words, CommandOptions{.environment = without_launcher()});
}

TEST(RunTest, ANodeEndsAlsoWhileNodeZeroIsFrozen) {
  const std::string endpoint = free_endpoint();
  const std::vector<std::string> program{
      "/bin/sh",
      "-c",
      "trap 'exit 0' TERM INT; i=0; while :; do echo at $i; i=$((i+1)); "
      "sleep 0.1; done"};
  auto first = start_node(0, endpoint, program);
  auto second = start_node(1, endpoint, program);
  ASSERT_TRUE(first->wait_for_output("[0] at 3\n"));
  ASSERT_TRUE(second->wait_for_output("[1] at 3\n"));
  kill(first->pid(), SIGSTOP);
  ASSERT_TRUE(
      second->wait_for_output("[1] at 43\n")); // ranks continue to be heard
  kill(second->pid(), SIGINT);
  const auto result = second->wait();
  EXPECT_EQ(result.exit_code, 128 + SIGINT) << result.output;
  EXPECT_THAT(result.output, HasSubstr("interrupted by SIGINT"));
}

/// Only a minute without a sign of life does.
TEST(RunTest, ANodeZeroThatStandsStillForSecondsDoesNotCostTheRestarts) {
  char name[] = "/tmp/tessera_run_XXXXXX";
  ASSERT_NE(mkdtemp(name), nullptr);
  const std::filesystem::path folder = name;
  const std::string endpoint = free_endpoint();
  const std::vector<std::string> program{
      "--max-restarts",
      "1",
      "/bin/sh",
      "-c",
      "test $TORCHELASTIC_RESTART_COUNT = 0 || exit 0; echo ready; "
      "while test $RANK = 0 || ! test -e $0/fail; do sleep 0.05; done; "
      "touch $0/failed; exit 7",
      folder.string()};
  auto first = start_node(0, endpoint, program);
  auto second = start_node(1, endpoint, program);
  ASSERT_TRUE(first->wait_for_output("[0] ready\n"));
  ASSERT_TRUE(second->wait_for_output("[1] ready\n"));
  kill(first->pid(), SIGSTOP);
  std::ofstream(folder / "fail").flush();
  while (!std::filesystem::exists(folder / "failed")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::this_thread::sleep_for(std::chrono::seconds(8));
  kill(first->pid(), SIGCONT);
  for (Command* node : {first.get(), second.get()}) {
    const auto result = node->wait();
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_THAT(
        result.output,
        AllOf(
            HasSubstr("rank 1 on node 1 failed first"),
            HasSubstr("restarting (1 of 1)")));
  }
  std::filesystem::remove_all(folder);
}

TEST(RunTest, ANodeThatWaitsForNodeZeroCanBeInterrupted) {
  auto node = start_node(1, free_endpoint(), {"/bin/true"});
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  kill(node->pid(), SIGINT);
  const auto result = node->wait();
  EXPECT_EQ(result.exit_code, 128 + SIGINT) << result.output;
}

TEST(RunTest, ANodeSaysWhereItLookedForNodeZero) {
  const std::string endpoint = free_endpoint();
  const auto result =
      start_node(1, endpoint, {"--join-timeout", "2", "/bin/true"})->wait();
  EXPECT_EQ(result.exit_code, 1) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("waited 2 s for the launcher of node 0"),
          HasSubstr(endpoint),
          HasSubstr("--rdzv-endpoint"),
          HasSubstr("Connection refused")));
}

TEST(RunTest, RejectsTimesThatCannotBeWaited) {
  for (const char* seconds : {"1e12", "inf", "nan", "-1"}) {
    for (const char* flag : {"--stop-timeout", "--join-timeout"}) {
      const auto result =
          run({"-n", "1", std::string(flag) + "=" + seconds, "/bin/true"});
      EXPECT_EQ(result.exit_code, 2) << flag << seconds;
      EXPECT_THAT(result.output, HasSubstr(flag)) << seconds;
    }
  }
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
