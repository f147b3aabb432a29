#include "launch/failure_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

namespace tessera::launch {
namespace {

RankEnd stopped(int rank, ExitStatus status, double seconds) {
  return RankEnd{
      .rank = rank,
      .kind = RankEnd::Kind::Stopped,
      .status = status,
      .stop_seconds = seconds};
}

TEST(SummaryTest, TellsTheWholeStory) {
  RunOptions options;
  options.program = "./train";
  options.args = {"--lr", "1e-3", "--name", "it's mine"};
  options.ranks_per_node = 6;
  const FailureReport report{
      .first =
          {.rank = 2,
           .kind = RankEnd::Kind::Failed,
           .status = {.code = 3, .signal = 0},
           .stop_seconds = 0},
      .pid = 4711,
      .seconds = 12.44,
      .attempt = 0,
      .speaker = 2,
      .last_lines = {"step 7", "what(): lost"},
      .log_path = "runs/logs/attempt_0/rank_2/stderr.log",
      .others = {
          stopped(0, {.code = 0, .signal = SIGTERM}, 0.1),
          {.rank = 1,
           .kind = RankEnd::Kind::Finished,
           .status = {},
           .stop_seconds = 0},
          stopped(3, {.code = 0, .signal = SIGKILL}, 4.5),
          {.rank = 4,
           .kind = RankEnd::Kind::Failed,
           .status = {.code = 0, .signal = SIGABRT},
           .stop_seconds = 0},
          stopped(5, {.code = 1, .signal = 0}, 0.1)}};
  EXPECT_EQ(
      failure_text(options, report),
      "rank 2 failed first (pid 4711, exit code 3, after 12.4 s, attempt 1 of "
      "1).\n"
      "  program: ./train --lr 1e-3 --name 'it'\\''s mine'\n"
      "  its last lines:\n"
      "    [2] step 7\n"
      "    [2] what(): lost\n"
      "  also failed: 4 (killed by SIGABRT (aborted)).\n"
      "  had finished: 1.\n"
      "  the other ranks were stopped: 0 (SIGTERM), 3 (SIGKILL after 4.5 s), 5 "
      "(exit code 1).\n"
      "  logs: runs/logs/attempt_0/rank_2/stderr.log");
}

TEST(SummaryTest, NamesTheNodeWhereThereAreSeveral) {
  RunOptions options;
  options.program = "./train";
  options.num_nodes = 2;
  options.node_rank = 1;
  FailureReport report;
  report.first.rank = 1;
  report.first.status.signal = SIGKILL;
  report.pid = 12;
  EXPECT_EQ(
      failure_text(options, report),
      "rank 1 on node 1 failed first (pid 12, killed by SIGKILL (killed), "
      "after 0.0 s, attempt 1 of 1).\n"
      "  SIGKILL often comes from the kernel's out-of-memory killer: check "
      "dmesg.\n"
      "  program: ./train\n"
      "  it printed nothing.");
  report.speaker = 0;
  report.last_lines = {"no such flag"};
  EXPECT_THAT(
      failure_text(options, report),
      ::testing::HasSubstr("  it printed nothing; the last lines of rank 0:\n"
                           "    [0] no such flag"));
}

} // namespace
} // namespace tessera::launch
