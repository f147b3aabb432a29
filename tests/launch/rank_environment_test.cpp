#include "launch/rank_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::launch {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::Not;
using testing::StartsWith;

const Endpoint kEndpoint{.address = "10.0.0.7", .port = 29501};

TEST(EnvironmentTest, MatchesTorchrun) {
  RunOptions options;
  options.ranks_per_node = 4;
  options.num_nodes = 2;
  options.node_rank = 1;
  options.max_restarts = 3;
  options.run_id = "job17";
  options.cpu_threads = 6;
  EXPECT_THAT(
      rank_environment(
          options, {"HOME=/home/user", "RANK=77"}, kEndpoint, 2, 3),
      ElementsAre(
          "GROUP_RANK=1",
          "GROUP_WORLD_SIZE=2",
          "HOME=/home/user",
          "LOCAL_RANK=3",
          "LOCAL_WORLD_SIZE=4",
          "MASTER_ADDR=10.0.0.7",
          "MASTER_PORT=29501",
          "MKL_NUM_THREADS=6",
          "OMP_NUM_THREADS=6",
          "RANK=7",
          "ROLE_NAME=default",
          "ROLE_RANK=7",
          "ROLE_WORLD_SIZE=8",
          "TORCHELASTIC_MAX_RESTARTS=3",
          "TORCHELASTIC_RESTART_COUNT=2",
          "TORCHELASTIC_RUN_ID=job17",
          "TORCHELASTIC_USE_AGENT_STORE=True",
          "WORLD_SIZE=8"));
}

TEST(EnvironmentTest, LiveLinesAreOfferedByThisLauncherAlone) {
  const auto with = rank_environment(RunOptions{}, {}, kEndpoint, 0, 0, 120);
  EXPECT_THAT(with, Contains("TESSERA_LIVE=120"));
  const auto without =
      rank_environment(RunOptions{}, {"TESSERA_LIVE=80"}, kEndpoint, 0, 0);
  EXPECT_THAT(without, Not(Contains("TESSERA_LIVE=80")));
}

TEST(EnvironmentTest, ThreadCountsDefaultToTheCoresOfEachRank) {
  RunOptions options;
  options.ranks_per_node = 2;
  const std::string count = std::to_string(default_cpu_threads(2));
  const auto environment = rank_environment(options, {}, kEndpoint, 0, 0);
  EXPECT_THAT(environment, Contains("OMP_NUM_THREADS=" + count));
  EXPECT_THAT(environment, Contains("MKL_NUM_THREADS=" + count));
}

TEST(EnvironmentTest, UsersThreadCountIsKept) {
  const auto inherited =
      rank_environment(RunOptions{}, {"OMP_NUM_THREADS=3"}, kEndpoint, 0, 0);
  EXPECT_THAT(inherited, Contains("OMP_NUM_THREADS=3"));
  EXPECT_THAT(inherited, Not(Contains(StartsWith("MKL_NUM_THREADS="))));

  RunOptions options;
  options.extra_env = {{"OMP_NUM_THREADS", "5"}};
  EXPECT_THAT(
      rank_environment(options, {"OMP_NUM_THREADS=3"}, kEndpoint, 0, 0),
      Contains("OMP_NUM_THREADS=5"));
}

TEST(EnvironmentTest, ExplicitThreadCountWinsOverTheInheritedOne) {
  RunOptions options;
  options.cpu_threads = 2;
  EXPECT_THAT(
      rank_environment(options, {"OMP_NUM_THREADS=3"}, kEndpoint, 0, 0),
      Contains("OMP_NUM_THREADS=2"));
}

TEST(EnvironmentTest, ExtraVariablesWinOverInheritedOnes) {
  RunOptions options;
  options.extra_env = {{"MODE", "fast"}, {"EMPTY", ""}};
  const auto environment =
      rank_environment(options, {"MODE=slow", "PATH=/bin"}, kEndpoint, 0, 0);
  EXPECT_THAT(environment, Contains("MODE=fast"));
  EXPECT_THAT(environment, Contains("EMPTY="));
  EXPECT_THAT(environment, Contains("PATH=/bin"));
  EXPECT_THAT(environment, Not(Contains("MODE=slow")));
}

} // namespace
} // namespace tessera::launch
