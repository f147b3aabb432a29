// Signals that a launcher gets, and what its ranks get of them.
#include "launch/signals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <string>

#include "launch/supervisor.h"
#include "launcher_process.h"

namespace tessera::launch {
namespace {

using testing::HasSubstr;
using testing::Not;

// Ranks that announce themselves and write each signal's name to the file.
std::string listening_script(const std::filesystem::path& path) {
  const std::string file = path.string();
  std::string script;
  for (const char* signal : {"HUP", "USR1", "USR2"}) {
    script += std::string("trap 'echo ") + signal + " >>" + file + "' " +
        signal + "; ";
  }
  return script + "echo ready >>" + file + "; while :; do sleep 0.02; done";
}

TEST(SignalsTest, ForwardsSignals) {
  const TempDir dir;
  const std::filesystem::path file = dir / "signals";
  LauncherProcess launcher(shell_options(2, listening_script(file)));
  ASSERT_TRUE(eventually([&] { return count_lines(file, "ready") == 2; }));
  for (const auto& [signal, name] : std::map<int, std::string>{
           {SIGHUP, "HUP"}, {SIGUSR1, "USR1"}, {SIGUSR2, "USR2"}}) {
    launcher.signal(signal);
    EXPECT_TRUE(eventually([&, text = name] {
      return count_lines(file, text) == 2;
    })) << name;
  }
  launcher.signal(SIGTERM);
  EXPECT_EQ(launcher.wait().exit_code, 128 + SIGTERM);
}

TEST(SignalsTest, RanksThatAHangupEndedAreNotStartedAgain) {
  const TempDir dir;
  RunOptions options = shell_options(
      2, "echo ready >>" + (dir / "ready").string() + "; exec sleep 30");
  options.max_restarts = 3;
  LauncherProcess launcher(options);
  ASSERT_TRUE(
      eventually([&] { return count_lines(dir / "ready", "ready") == 2; }));
  launcher.signal(SIGHUP);
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGHUP);
  EXPECT_THAT(result.err, HasSubstr("killed by SIGHUP"));
  EXPECT_THAT(result.err, Not(HasSubstr("restarting")));
}

TEST(SignalsTest, InterruptIsForwardedAndNeverRestarts) {
  const TempDir dir;
  RunOptions options = shell_options(
      2,
      "trap 'echo got INT; exit 9' INT; echo ready >>" +
          (dir / "ready").string() + "; while :; do sleep 0.02; done");
  options.max_restarts = 3;
  LauncherProcess launcher(options);
  ASSERT_TRUE(
      eventually([&] { return count_lines(dir / "ready", "ready") == 2; }));
  launcher.signal(SIGINT);
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_THAT(result.out, HasSubstr("[0] got INT\n"));
  EXPECT_THAT(result.out, HasSubstr("[1] got INT\n"));
  EXPECT_THAT(
      result.err,
      HasSubstr("tessera run: interrupted by SIGINT; the ranks were stopped: "
                "0 (exit code 9), 1 (exit code 9).\n"));
  EXPECT_THAT(result.err, Not(HasSubstr("restarting")));
}

TEST(SignalsTest, SecondInterruptKillsAtOnce) {
  const TempDir dir;
  RunOptions options = shell_options(
      1,
      "trap 'echo INT >>" + (dir / "log").string() + "' INT; echo ready >>" +
          (dir / "log").string() + "; while :; do sleep 0.02; done");
  options.interrupt_grace = std::chrono::minutes(20); // longer than the test
  LauncherProcess launcher(options);
  ASSERT_TRUE(
      eventually([&] { return count_lines(dir / "log", "ready") == 1; }));
  launcher.signal(SIGINT);
  ASSERT_TRUE(eventually([&] { return count_lines(dir / "log", "INT") == 1; }));
  launcher.signal(SIGINT);
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_THAT(result.err, HasSubstr("0 (SIGKILL after "));
}

TEST(SignalsTest, SuspendStopsRanksAndContinueResumesThem) {
  const TempDir dir;
  const std::filesystem::path pids = dir / "pids";
  // It starts no process: a shell that is stopped inside vfork() shows as
  // waiting, not as stopped.
  LauncherProcess launcher(shell_options(
      1,
      "echo $$ >>" + pids.string() + "; while [ ! -e " + (dir / "go").string() +
          " ]; do :; done; echo went"));
  ASSERT_TRUE(eventually([&] { return read_pids(pids).size() == 1; }));
  const pid_t rank = read_pids(pids).front();
  auto state = [](pid_t pid) {
    const std::string stat =
        read_text("/proc/" + std::to_string(pid) + "/stat");
    return stat.empty() ? '?' : stat[stat.rfind(')') + 2];
  };
  launcher.signal(SIGTSTP);
  EXPECT_TRUE(eventually(
      [&] { return state(rank) == 'T' && state(launcher.pid()) == 'T'; }));
  launcher.signal(SIGCONT);
  EXPECT_TRUE(eventually(
      [&] { return state(rank) != 'T' && state(launcher.pid()) != 'T'; }));
  std::filesystem::create_directory(dir / "go");
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "[0] went\n");
}

} // namespace
} // namespace tessera::launch
