#include "launch/supervisor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "launch/signals.h"
#include "launcher_process.h"

namespace tessera::launch {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;
using testing::StartsWith;

bool none_alive(const std::vector<pid_t>& pids) {
  return std::none_of(pids.begin(), pids.end(), is_alive);
}

TEST(SupervisorTest, AllRanksSucceed) {
  const LauncherResult result = launch(shell_options(3, "echo hello $RANK"));
  EXPECT_EQ(result.exit_code, 0);
  std::vector<std::string> lines = split_lines(result.out);
  std::sort(lines.begin(), lines.end());
  EXPECT_EQ(
      lines,
      (std::vector<std::string>{"[0] hello 0", "[1] hello 1", "[2] hello 2"}));
  EXPECT_EQ(result.err, "");
}

TEST(SupervisorTest, FirstFailureIsReportedWithItsLastLines) {
  const LauncherResult result = launch(shell_options(
      4,
      "if [ $RANK = 2 ]; then i=1; while [ $i -le 25 ]; do echo line $i >&2; "
      "i=$((i+1)); done; echo not this; exit 3; fi; exec sleep 30"));
  EXPECT_EQ(result.exit_code, 3);
  const size_t summary = result.err.find("tessera run: rank 2 failed first");
  ASSERT_NE(summary, std::string::npos) << result.err;
  const std::string text = result.err.substr(summary);
  EXPECT_THAT(text, HasSubstr("exit code 3, after "));
  EXPECT_THAT(text, HasSubstr("attempt 1 of 1)."));
  EXPECT_THAT(text, HasSubstr("\n  program: /bin/sh -c '"));
  EXPECT_THAT(text, HasSubstr("\n  its last lines:\n    [2] line 6\n"));
  EXPECT_THAT(text, HasSubstr("\n    [2] line 25\n"));
  EXPECT_THAT(text, Not(HasSubstr("[2] line 5\n")));
  EXPECT_THAT(text, Not(HasSubstr("[2] not this")));
  EXPECT_THAT(
      text,
      HasSubstr("the other ranks were stopped: 0 (SIGTERM), 1 (SIGTERM), 3 "
                "(SIGTERM)."));
}

TEST(SupervisorTest, FirstOfSeveralUnseenFailuresIsReported) {
  const TempDir dir;
  const std::string base = dir.str();
  // Rank 2 fails, then ranks 0 and 1, all while the launcher is suspended.
  LauncherProcess launcher(shell_options(
      3,
      "cd " + base +
          "; [ $RANK = 2 ] && echo $$ >first; echo $$ >>pids; "
          "while [ ! -e go ]; do sleep 0.01; done; "
          "[ $RANK = 2 ] || { until grep -q 'State:.Z' /proc/$(cat first)/status; "
          "do sleep 0.01; done; sleep 0.1; }; exit $((RANK + 20))"));
  ASSERT_TRUE(eventually([&] { return read_pids(dir / "pids").size() == 3; }));
  launcher.signal(SIGSTOP);
  std::filesystem::create_directory(dir / "go");
  ASSERT_TRUE(eventually([&] { return none_alive(read_pids(dir / "pids")); }));
  launcher.signal(SIGCONT);
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 22);
  EXPECT_THAT(result.err, HasSubstr("rank 2 failed first"));
  EXPECT_THAT(
      result.err,
      HasSubstr("also failed: 0 (exit code 20), 1 (exit code 21)."));
}

TEST(SupervisorTest, LastLinesAreFromStdoutWhereStderrIsEmpty) {
  const LauncherResult result =
      launch(shell_options(1, "printf 'last words'; exit 1"));
  EXPECT_THAT(result.err, HasSubstr("its last lines:\n    [0] last words\n"));
}

TEST(SupervisorTest, RankThatFinishesEarlyLeavesOthersRunning) {
  const LauncherResult result =
      launch(shell_options(2, "[ $RANK = 0 ] && exit 0; sleep 0.3; echo late"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "[1] late\n");
}

TEST(SupervisorTest, ExitCodeOfSignalIs128Plus) {
  const LauncherResult result = launch(shell_options(1, "kill -SEGV $$"));
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV);
  EXPECT_THAT(result.err, HasSubstr("killed by SIGSEGV (segmentation fault)"));
}

TEST(SupervisorTest, KilledRankHintsAtOutOfMemory) {
  const LauncherResult result = launch(shell_options(1, "kill -KILL $$"));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(result.err, HasSubstr("check dmesg"));
}

/// Waits, in a script, until ranks have written that many lines to the file.
std::string wait_for_lines(const std::filesystem::path& path, int count) {
  const std::string file = path.string();
  return "until [ -e " + file + " ] && [ $(wc -l <" + file +
      ") = " + std::to_string(count) + " ]; do sleep 0.02; done; ";
}

TEST(SupervisorTest, StopsOthersWithinGrace) {
  const TempDir dir;
  const std::filesystem::path ready = dir / "ready";
  RunOptions options = shell_options(
      3,
      "if [ $RANK = 1 ]; then " + wait_for_lines(ready, 2) +
          "exit 7; fi; if [ $RANK = 2 ]; then trap '' TERM; fi; echo >>" +
          ready.string() + "; while :; do sleep 0.05; done");
  options.stop_grace = milliseconds(1000);
  const LauncherResult result = launch(options);
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_GT(result.seconds, 0.9);
  EXPECT_THAT(
      result.err, HasSubstr("were stopped: 0 (SIGTERM), 2 (SIGKILL after "));
}

TEST(SupervisorTest, RanksMayEndCleanlyWithinGrace) {
  const TempDir dir;
  const std::filesystem::path ready = dir / "ready";
  RunOptions options = shell_options(
      2,
      "[ $RANK = 1 ] && { " + wait_for_lines(ready, 1) +
          "exit 7; }; trap 'echo saved; exit 0' TERM; echo >>" +
          ready.string() + "; while :; do sleep 0.05; done");
  options.stop_grace = std::chrono::minutes(2);
  const LauncherResult result = launch(options);
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_THAT(result.out, HasSubstr("[0] saved\n"));
  EXPECT_THAT(result.err, HasSubstr("were stopped: 0 (exit code 0)."));
}

TEST(SupervisorTest, RanksMayTakeLongerToEndWhereTheUserAsked) {
  const TempDir dir;
  RunOptions options = shell_options(
      2,
      "trap 'sleep 0.5; echo saved; exit 0' TERM; echo >>" +
          (dir / "ready").string() + "; while :; do sleep 0.05; done");
  options.stop_grace = milliseconds(100);
  options.interrupt_grace = std::chrono::minutes(2);
  LauncherProcess launcher(options);
  ASSERT_TRUE(eventually(
      [&] { return split_lines(read_text(dir / "ready")).size() == 2; }));
  launcher.signal(SIGTERM);
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.out, HasSubstr("[0] saved\n"));
  EXPECT_THAT(result.out, HasSubstr("[1] saved\n"));
}

TEST(SupervisorTest, GrandchildrenDoNotSurvive) {
  const TempDir dir;
  // One stays in the rank's group, one is in a session of its own with its
  // parent gone; both hold the rank's stdout.
  RunOptions options = shell_options(
      1,
      "sleep 60 & echo $! >>" + (dir / "pids").string() +
          "; (setsid sh -c 'echo $$ >>" + (dir / "pids").string() +
          "; trap \"\" TERM; while :; do sleep 0.05; done' &) ; "
          "while [ $(wc -l <" +
          (dir / "pids").string() + ") -lt 2 ]; do sleep 0.02; done; echo end");
  options.stop_grace = milliseconds(500);
  const LauncherResult result = launch(options);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "[0] end\n");
  EXPECT_THAT(result.err, HasSubstr("that they left running"));
  const std::vector<pid_t> pids = read_pids(dir / "pids");
  EXPECT_THAT(pids, SizeIs(2));
  EXPECT_TRUE(none_alive(pids));
}

TEST(SupervisorTest, RanksDieWhenLauncherIsKilled) {
  const TempDir dir;
  LauncherProcess launcher(shell_options(
      3, "echo $$ >>" + (dir / "pids").string() + "; exec sleep 60"));
  ASSERT_TRUE(eventually([&] { return read_pids(dir / "pids").size() == 3; }));
  launcher.signal(SIGKILL);
  EXPECT_TRUE(eventually([&] { return none_alive(read_pids(dir / "pids")); }));
  EXPECT_EQ(launcher.wait().exit_code, -SIGKILL);
}

TEST(SupervisorTest, MissingProgramIsOneClearError) {
  RunOptions options = shell_options(3, "");
  options.program = "./no_such_program";
  options.max_restarts = 2;
  const LauncherResult result = launch(options);
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_EQ(
      result.err,
      "tessera run: cannot start \"./no_such_program\": No such file or "
      "directory. Check the path.\n");
}

TEST(SupervisorTest, NameThatIsNotInPathSaysSo) {
  RunOptions options = shell_options(1, "");
  options.program = "no_such_program";
  const LauncherResult result = launch(options);
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.err, HasSubstr("not in PATH"));
  EXPECT_THAT(result.err, HasSubstr("\"./no_such_program\""));
}

TEST(SupervisorTest, FileThatIsNotExecutableIs126) {
  RunOptions options = shell_options(1, "");
  options.program = "/etc/passwd";
  const LauncherResult result = launch(options);
  EXPECT_EQ(result.exit_code, 126);
  EXPECT_THAT(result.err, HasSubstr("\"/etc/passwd\": Permission denied"));
}

TEST(SupervisorTest, ProgramIsFoundInPath) {
  RunOptions options = shell_options(1, "echo found");
  options.program = "sh";
  EXPECT_EQ(launch(options).out, "[0] found\n");
}

TEST(SupervisorTest, RanksHaveEmptyStdinAndTheirOwnGroup) {
  const LauncherResult result = launch(shell_options(
      1, "cat; [ $(ps -o pgid= -p $$ | tr -d ' ') = $$ ] && echo leader"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "[0] leader\n");
}

TEST(SupervisorTest, RanksInheritNoDescriptorsAndNoBlockedSignals) {
  const RunOptions options = shell_options(
      1,
      "ls /proc/self/fd | wc -l; "
      "grep -E 'SigBlk|SigIgn' /proc/self/status | tr -s '\\t\\n' '  '");
  LauncherProcess launcher([&] {
    block_supervised_signals();
    // A descriptor without close-on-exec, as libraries leave behind.
    if (::dup(STDIN_FILENO) < 0) {
      return 99;
    }
    return run(options, fixed_endpoint);
  });
  // What this process was started with is passed on, and nothing more.
  std::string ignored;
  for (const std::string& line : split_lines(read_text("/proc/self/status"))) {
    if (line.rfind("SigIgn:", 0) == 0) {
      ignored = line.substr(line.find('\t') + 1);
    }
  }
  const std::string out = launcher.wait().out;
  // ls itself has one more open than 0, 1 and 2.
  const std::string before = "[0] 4\n[0] SigBlk: 0000000000000000 SigIgn: ";
  ASSERT_THAT(out, StartsWith(before));
  // The C library keeps signals 32 and 33 for itself, and does not pass them on
  // to every kind of child.
  const auto mask = [](const std::string& digits) {
    return std::stoull(digits, nullptr, 16) & ~(3ULL << 31);
  };
  EXPECT_EQ(mask(out.substr(before.size())), mask(ignored)) << out;
}

TEST(SupervisorTest, SurvivesThreadsInTheLauncher) {
  const TempDir dir;
  const RunOptions options = shell_options(
      8, "echo ready >>" + (dir / "ready").string() + "; exec sleep 30");
  LauncherProcess launcher([&] {
    block_supervised_signals();
    // The heap's locks are held by one thread or another at every fork.
    std::atomic<bool> stop = false;
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&stop] {
        while (!stop) {
          std::vector<std::string> work(20, std::string(500, 'x'));
        }
      });
    }
    const int exit_code = run(options, fixed_endpoint);
    stop = true;
    for (std::thread& thread : threads) {
      thread.join();
    }
    return exit_code;
  });
  ASSERT_TRUE(
      eventually([&] { return count_lines(dir / "ready", "ready") == 8; }));
  launcher.signal(SIGTERM);
  EXPECT_EQ(launcher.wait().exit_code, 128 + SIGTERM);
}

TEST(SupervisorTest, EnvironmentReachesRanks) {
  RunOptions options = shell_options(
      1, "echo $RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $GREETING");
  options.extra_env = {{"GREETING", "hello there"}};
  EXPECT_EQ(launch(options).out, "[0] 0/1 127.0.0.1:29400 hello there\n");
}

TEST(SupervisorTest, RestoresWhatItChangesInTheProcess) {
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  const int null_fd = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  const int exit_code =
      run(shell_options(1, "exit 6"),
          fixed_endpoint,
          nullptr,
          {.out_fd = null_fd, .err_fd = null_fd});
  ::close(null_fd);
  EXPECT_EQ(exit_code, 6);

  sigset_t after;
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int signal = 1; signal < SIGRTMIN; ++signal) {
    EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal));
  }
  int subreaper = -1;
  ::prctl(PR_GET_CHILD_SUBREAPER, &subreaper);
  EXPECT_EQ(subreaper, 0);
  struct sigaction pipe_action;
  sigaction(SIGPIPE, nullptr, &pipe_action);
  EXPECT_EQ(pipe_action.sa_handler, SIG_DFL);
}

TEST(SupervisorTest, LeavesTheCallersChildrenAlone) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl("/bin/sleep", "sleep", "30", nullptr);
    ::_exit(127);
  }
  const int null_fd = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  EXPECT_EQ(
      run(shell_options(1, "true"),
          fixed_endpoint,
          nullptr,
          {.out_fd = null_fd, .err_fd = null_fd}),
      0);
  ::close(null_fd);
  EXPECT_TRUE(is_alive(child));
  ::kill(child, SIGKILL);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST(SupervisorTest, FailingEndpointProviderIsReported) {
  const RunOptions options = shell_options(1, "true");
  LauncherProcess launcher([&] {
    return run(options, [](int) -> Endpoint {
      throw std::runtime_error("port 29400 is taken");
    });
  });
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("attempt 0: port 29400 is taken"));
}

TEST(SupervisorTest, RejectsSeveralNodesWithoutAChannel) {
  RunOptions options = shell_options(1, "true");
  options.num_nodes = 2;
  EXPECT_THROW(run(options, fixed_endpoint), InvalidRunOptions);
}

} // namespace
} // namespace tessera::launch
