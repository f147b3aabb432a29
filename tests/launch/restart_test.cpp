// Ranks that are started again after a failure.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "launch/backoff.h"
#include "launch/supervisor.h"
#include "launcher_process.h"

namespace tessera::launch {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

TEST(RestartTest, RestartsUpToMax) {
  RunOptions options = shell_options(
      2,
      "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS "
      "port $MASTER_PORT; [ $RANK = 1 ] && exit 5; exec sleep 30");
  options.max_restarts = 2;
  LauncherProcess launcher([&] {
    return run(options, [](int attempt) {
      return Endpoint{.address = "127.0.0.1", .port = 29400 + attempt};
    });
  });
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 5);
  for (int attempt = 0; attempt <= 2; ++attempt) {
    EXPECT_THAT(
        result.out,
        HasSubstr(
            "[1] attempt " + std::to_string(attempt) + " of 2 port " +
            std::to_string(29400 + attempt)));
    EXPECT_THAT(
        result.err,
        HasSubstr("attempt " + std::to_string(attempt + 1) + " of 3)"));
  }
  EXPECT_THAT(result.err, HasSubstr("tessera run: restarting (1 of 2)\n"));
  EXPECT_THAT(
      result.err,
      HasSubstr(
          "tessera run: restarting (2 of 2) in 0.5 s, since 2 attempts in "
          "a row failed within a minute\n"));
  EXPECT_THAT(result.err, Not(HasSubstr("restarting (3")));
}

TEST(RestartTest, ACrashLoopBacksOff) {
  const TempDir dir;
  RunOptions options = shell_options(
      1, "date +%s%N >>" + (dir / "starts").string() + "; exit 3");
  options.max_restarts = 3;
  EXPECT_EQ(launch(options).exit_code, 3);
  std::vector<int64_t> starts;
  for (const std::string& line : split_lines(read_text(dir / "starts"))) {
    starts.push_back(std::stoll(line));
  }
  ASSERT_THAT(starts, SizeIs(4));
  EXPECT_GE(starts[2] - starts[1], 500'000'000);
  EXPECT_GE(starts[3] - starts[2], 1'000'000'000);
}

TEST(RestartTest, TheWaitBeforeARestartCanBeInterrupted) {
  const TempDir dir;
  RunOptions options = shell_options(
      1, "echo start >>" + (dir / "starts").string() + "; exit 3");
  options.max_restarts = 50;
  LauncherProcess launcher(options);
  ASSERT_TRUE(eventually(
      [&] { return split_lines(read_text(dir / "starts")).size() >= 3; }));
  launcher.signal(SIGTERM);
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.err, HasSubstr("interrupted by SIGTERM"));
}

TEST(BackoffTest, DoublesUpToItsLongest) {
  using std::chrono::milliseconds;
  EXPECT_EQ(restart_delay(0), milliseconds(0));
  EXPECT_EQ(restart_delay(1), milliseconds(0));
  EXPECT_EQ(restart_delay(2), milliseconds(500));
  EXPECT_EQ(restart_delay(3), milliseconds(1000));
  EXPECT_EQ(restart_delay(7), milliseconds(16000));
  EXPECT_EQ(restart_delay(8), milliseconds(30000));
  EXPECT_EQ(restart_delay(1 << 30), milliseconds(30000));
}

TEST(RestartTest, RestartMayMendTheRun) {
  RunOptions options =
      shell_options(2, "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; exit 4");
  options.max_restarts = 5;
  const LauncherResult result = launch(options);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("restarting (1 of 5)"));
  EXPECT_THAT(result.err, Not(HasSubstr("restarting (2")));
}

} // namespace
} // namespace tessera::launch
