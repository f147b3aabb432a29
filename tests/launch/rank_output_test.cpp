// What becomes of what ranks write.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "launch/supervisor.h"
#include "launcher_process.h"

namespace tessera::launch {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;
using testing::StartsWith;

TEST(RankOutputTest, StreamsAreKeptApartAndPrefixesAligned) {
  const LauncherResult result = launch(
      shell_options(11, "[ $RANK = 3 ] && echo out && echo err >&2; true"));
  EXPECT_EQ(result.out, "[ 3] out\n");
  EXPECT_EQ(result.err, "[ 3] err\n");
}

TEST(RankOutputTest, LinesNeverInterleave) {
  constexpr int kRanks = 4;
  constexpr int kLines = 2000;
  // Each line is written in three pieces; the last one has no newline.
  LauncherProcess launcher(shell_options(
      kRanks,
      "i=0; while [ $i -lt 2000 ]; do printf \"<$RANK:\"; printf $i; "
      "printf ':0123456789012345678901234567890123456789>\\n'; "
      "i=$((i+1)); done; printf end"));
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 0);
  std::map<std::string, std::vector<std::string>> by_rank;
  for (const std::string& line : split_lines(result.out)) {
    ASSERT_GE(line.size(), 4U) << line;
    by_rank[line.substr(0, 4)].push_back(line.substr(4));
  }
  ASSERT_THAT(by_rank, SizeIs(kRanks));
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto& lines = by_rank["[" + std::to_string(rank) + "] "];
    ASSERT_THAT(lines, SizeIs(kLines + 1));
    for (int i = 0; i < kLines; ++i) {
      ASSERT_EQ(
          lines[static_cast<size_t>(i)],
          "<" + std::to_string(rank) + ":" + std::to_string(i) +
              ":0123456789012345678901234567890123456789>");
    }
    EXPECT_EQ(lines.back(), "end");
  }
}

TEST(RankOutputTest, LinesStayWholeWhereBothStreamsAreOneFile) {
  const RunOptions options = shell_options(
      2,
      "i=0; while [ $i -lt 5000 ]; do echo out-0123456789-out; "
      "echo err-0123456789-err >&2; i=$((i+1)); done");
  LauncherProcess launcher([&] {
    ::dup2(STDOUT_FILENO, STDERR_FILENO);
    return run(options, fixed_endpoint);
  });
  // Let the pipe fill up, so that writes end in the middle of lines.
  std::this_thread::sleep_for(milliseconds(100));
  const LauncherResult result = launcher.wait();
  std::map<std::string, int> counts;
  for (const std::string& line : split_lines(result.out)) {
    ++counts[line];
  }
  const std::map<std::string, int> expected{
      {"[0] out-0123456789-out", 5000},
      {"[0] err-0123456789-err", 5000},
      {"[1] out-0123456789-out", 5000},
      {"[1] err-0123456789-err", 5000}};
  EXPECT_EQ(counts, expected);
}

TEST(RankOutputTest, SlowReaderLosesNothing) {
  // More than the launcher buffers, read only after a while.
  LauncherProcess launcher(shell_options(
      1,
      "i=0; while [ $i -lt 60000 ]; do echo $i abcdefghijklmnopqrstuvwxyz; "
      "i=$((i+1)); done"));
  std::this_thread::sleep_for(milliseconds(300));
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 0);
  const std::vector<std::string> lines = split_lines(result.out);
  ASSERT_THAT(lines, SizeIs(60000));
  EXPECT_EQ(lines.back(), "[0] 59999 abcdefghijklmnopqrstuvwxyz");
}

TEST(RankOutputTest, ClosedConsoleStopsTheRun) {
  LauncherProcess launcher(
      shell_options(2, "while :; do echo tick; sleep 0.05; done"));
  launcher.close_stdout();
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.err,
      HasSubstr("tessera run: cannot write to standard output: Broken pipe"));
}

TEST(RankOutputTest, FullConsoleStopsTheRun) {
  const RunOptions options =
      shell_options(1, "while :; do echo tick; sleep 0.05; done");
  LauncherProcess launcher([&] {
    return ::freopen("/dev/full", "w", stdout) == nullptr
        ? 99
        : run(options, fixed_endpoint);
  });
  const LauncherResult result = launcher.wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("No space left on device"));
}

TEST(RankOutputTest, LogDirGetsEachRanksOutput) {
  const TempDir dir;
  RunOptions options = shell_options(
      2,
      "echo out $RANK; printf 'err %s' $RANK >&2; [ $RANK = 1 ] && exit 2; "
      "exec sleep 30");
  options.log_dir = dir / "a/b";
  options.max_restarts = 1;
  const LauncherResult result = launch(options);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, StartsWith("tessera run: rank 1 failed first"));
  const auto launched =
      std::filesystem::read_symlink(*options.log_dir / "latest");
  EXPECT_THAT(launched.string(), StartsWith("launch_"));
  for (const std::string attempt : {"attempt_0", "attempt_1"}) {
    const auto folder = *options.log_dir / launched / attempt;
    EXPECT_EQ(read_text(folder / "rank_1" / "stdout.log"), "out 1\n");
    EXPECT_EQ(read_text(folder / "rank_1" / "stderr.log"), "err 1");
    EXPECT_TRUE(std::filesystem::exists(folder / "rank_0" / "stderr.log"));
    EXPECT_THAT(
        result.err,
        HasSubstr("\n  logs: " + (folder / "rank_1" / "stderr.log").string()));
  }
}

TEST(RankOutputTest, LogDirKeepsTheLogsOfEarlierLaunches) {
  const TempDir dir;
  std::vector<std::filesystem::path> logs;
  for (const std::string word : {"first", "second", "third"}) {
    RunOptions options = shell_options(1, "echo " + word);
    options.log_dir = dir / "logs";
    EXPECT_EQ(launch(options).exit_code, 0);
    const auto latest = *options.log_dir / "latest";
    logs.push_back(
        *options.log_dir / std::filesystem::read_symlink(latest) /
        "attempt_0/rank_0/stdout.log");
    EXPECT_EQ(read_text(latest / "attempt_0/rank_0/stdout.log"), word + "\n");
  }
  EXPECT_EQ(read_text(logs[0]), "first\n");
  EXPECT_EQ(read_text(logs[1]), "second\n");
  EXPECT_EQ(read_text(logs[2]), "third\n");
}

TEST(RankOutputTest, TeePrintsAndLogs) {
  const TempDir dir;
  RunOptions options = shell_options(1, "echo both");
  options.log_dir = dir / "logs";
  options.tee = true;
  EXPECT_EQ(launch(options).out, "[0] both\n");
  EXPECT_EQ(
      read_text(*options.log_dir / "latest/attempt_0/rank_0/stdout.log"),
      "both\n");
}

TEST(RankOutputTest, UnusableLogDirIsOneErrorBeforeAnythingStarts) {
  const TempDir dir;
  RunOptions options = shell_options(2, "touch " + (dir / "started").string());
  options.log_dir = "/dev/null/logs";
  const LauncherResult result = launch(options);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.err,
      AllOf(
          StartsWith("tessera run: cannot write the log "
                     "\"/dev/null/logs/launch_"),
          HasSubstr("/attempt_0/rank_0/stdout.log\": Not a directory")));
  EXPECT_THAT(split_lines(result.err), SizeIs(1));
  EXPECT_FALSE(std::filesystem::exists(dir / "started"));
}

} // namespace
} // namespace tessera::launch
