#include "launch/nodes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "launcher_process.h"

namespace tessera::launch {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;

/// Launchers of several nodes over one channel.
class NodesTest : public testing::Test {
 protected:
  RunOptions node_options(int node, int num_nodes, const std::string& script) {
    RunOptions options = shell_options(2, script);
    options.num_nodes = num_nodes;
    options.node_rank = node;
    options.join_timeout = milliseconds(120'000);
    return options;
  }

  std::unique_ptr<LauncherProcess> start(const RunOptions& options) {
    return std::make_unique<LauncherProcess>([this, options] {
      FileChannel channel(dir_ / "channel");
      return run(
          options,
          [&](int attempt) {
            return Endpoint{.address = "10.0.0.1", .port = 29400 + attempt};
          },
          &channel);
    });
  }

  std::vector<LauncherResult> run_all(
      int num_nodes,
      const std::string& script,
      int max_restarts = 0) {
    std::vector<std::unique_ptr<LauncherProcess>> launchers;
    for (int node = 0; node < num_nodes; ++node) {
      RunOptions options = node_options(node, num_nodes, script);
      options.max_restarts = max_restarts;
      launchers.push_back(start(options));
    }
    std::vector<LauncherResult> results;
    for (auto& launcher : launchers) {
      results.push_back(launcher->wait());
    }
    return results;
  }

  std::string ready_line() const {
    return "echo ready >>" + (dir_ / "ready").string() + "; ";
  }
  bool wait_for_ranks(size_t count) const {
    return eventually(
        [&] { return split_lines(read_text(dir_ / "ready")).size() == count; });
  }

  TempDir dir_;
};

TEST_F(NodesTest, RanksAreNumberedAcrossNodes) {
  const std::vector<LauncherResult> results = run_all(
      3,
      "echo $RANK/$WORLD_SIZE $LOCAL_RANK $GROUP_RANK/$GROUP_WORLD_SIZE "
      "$MASTER_ADDR:$MASTER_PORT");
  for (size_t node = 0; node < results.size(); ++node) {
    EXPECT_EQ(results[node].exit_code, 0) << results[node].err;
    const std::string rank = std::to_string(2 * node + 1);
    EXPECT_THAT(
        results[node].out,
        HasSubstr(
            "[" + rank + "] " + rank + "/6 1 " + std::to_string(node) +
            "/3 10.0.0.1:29400\n"));
  }
}

TEST_F(NodesTest, TwoNodesShareOneVerdict) {
  const std::vector<LauncherResult> results = run_all(
      2,
      ready_line() + "if [ $RANK = 3 ]; then until [ $(wc -l <" +
          (dir_ / "ready").string() +
          ") = 4 ]; do sleep 0.02; done; echo last words >&2; exit 9; fi; "
          "exec sleep 600");
  for (const LauncherResult& result : results) {
    EXPECT_EQ(result.exit_code, 9);
    EXPECT_THAT(
        result.err,
        HasSubstr("tessera run: rank 3 on node 1 failed first (pid "));
    EXPECT_THAT(result.err, HasSubstr("    [3] last words\n"));
    EXPECT_THAT(
        result.err, HasSubstr("the other ranks were stopped: 2 (SIGTERM)."));
  }
  EXPECT_THAT(
      results[0].err,
      HasSubstr("the ranks of node 0 were stopped: 0 (SIGTERM), 1 (SIGTERM)."));
}

TEST_F(NodesTest, FailureStopsNodesThatHaveFinished) {
  const std::vector<LauncherResult> results = run_all(
      2, "[ $GROUP_RANK = 0 ] && exit 0; sleep 0.3; exit $((RANK + 10))");
  EXPECT_EQ(results[0].exit_code, results[1].exit_code);
  EXPECT_GE(results[0].exit_code, 12);
  EXPECT_THAT(results[0].err, HasSubstr("on node 1 failed first"));
}

TEST_F(NodesTest, AllNodesRestartTogether) {
  const std::vector<LauncherResult> results = run_all(
      2,
      "echo try $TORCHELASTIC_RESTART_COUNT at $MASTER_PORT; "
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; "
      "[ $RANK = 2 ] && exit 1; exec sleep 30",
      3);
  for (size_t node = 0; node < 2; ++node) {
    EXPECT_EQ(results[node].exit_code, 0);
    EXPECT_THAT(results[node].err, HasSubstr("restarting (1 of 3)"));
    EXPECT_THAT(results[node].err, Not(HasSubstr("restarting (2")));
    EXPECT_THAT(results[node].out, HasSubstr("try 1 at 29401\n"));
  }
}

TEST_F(NodesTest, InterruptOnOneNodeEndsAllWithoutRestart) {
  std::vector<std::unique_ptr<LauncherProcess>> launchers;
  for (int node = 0; node < 2; ++node) {
    RunOptions options = node_options(node, 2, ready_line() + "exec sleep 30");
    options.max_restarts = 3;
    launchers.push_back(start(options));
  }
  ASSERT_TRUE(wait_for_ranks(4));
  launchers[1]->signal(SIGINT);
  for (auto& launcher : launchers) {
    const LauncherResult result = launcher->wait();
    EXPECT_EQ(result.exit_code, 128 + SIGINT);
    EXPECT_THAT(result.err, HasSubstr("interrupted by SIGINT on node 1"));
    EXPECT_THAT(result.err, Not(HasSubstr("restarting")));
  }
}

TEST_F(NodesTest, OtherNodesHaveTheGraceOfTheCause) {
  for (const bool is_interrupt : {true, false}) {
    // Ranks take a while to save: after a failure longer than they have, after
    // an interrupt longer than they would have after a failure.
    const std::string script = "trap 'sleep " +
        std::string(is_interrupt ? "1" : "600") +
        "; echo saved; exit 0' TERM INT; " + ready_line() +
        "while [ $RANK != 3 ] || [ ! -e " + (dir_ / "fail").string() +
        " ]; do sleep 0.02; done; exit 7";
    std::filesystem::remove_all(dir_ / "channel");
    std::filesystem::remove(dir_ / "ready");
    std::vector<std::unique_ptr<LauncherProcess>> launchers;
    for (int node = 0; node < 2; ++node) {
      RunOptions options = node_options(node, 2, script);
      options.stop_grace = milliseconds(300);
      options.interrupt_grace = std::chrono::minutes(2);
      launchers.push_back(start(options));
    }
    ASSERT_TRUE(wait_for_ranks(4));
    if (is_interrupt) {
      launchers[1]->signal(SIGTERM);
    } else {
      std::ofstream(dir_ / "fail").flush();
    }
    const LauncherResult result = launchers[0]->wait();
    EXPECT_EQ(result.exit_code, is_interrupt ? 128 + SIGTERM : 7);
    EXPECT_EQ(result.out.find("[0] saved") != std::string::npos, is_interrupt);
    EXPECT_EQ(result.out.find("[1] saved") != std::string::npos, is_interrupt);
    launchers[1]->wait();
  }
}

TEST_F(NodesTest, InterruptWhileWaitingForOtherNodesEndsAll) {
  auto first = start(node_options(0, 3, "true"));
  auto second = start(node_options(1, 3, "true"));
  ASSERT_TRUE(eventually([&] {
    return std::filesystem::exists(dir_ / "channel/key_node_0") &&
        std::filesystem::exists(dir_ / "channel/key_node_1");
  }));
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait().exit_code, 128 + SIGTERM);
  const LauncherResult result = second->wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.err, HasSubstr("interrupted by SIGTERM on node 0"));
}

TEST_F(NodesTest, MissingNodesAreNamed) {
  RunOptions options = node_options(0, 4, "true");
  options.join_timeout = milliseconds(200);
  auto first = start(options);
  options.node_rank = 2;
  auto second = start(options);
  for (const LauncherResult& result : {first->wait(), second->wait()}) {
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(
        result.err, HasSubstr("waited 1 s for node(s) 1, 3 of 4. Start a"));
  }
}

TEST_F(NodesTest, RejectsDifferentRanksPerNodeOnAllNodes) {
  RunOptions options = node_options(0, 2, "true");
  auto first = start(options);
  options.node_rank = 1;
  options.ranks_per_node = 4;
  auto second = start(options);
  for (const LauncherResult& result : {first->wait(), second->wait()}) {
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(
        result.err, HasSubstr("the nodes do not agree on the ranks per node"));
    EXPECT_THAT(result.err, HasSubstr("node 1 has 4"));
    EXPECT_THAT(result.err, HasSubstr("node 0 has 2"));
  }
}

TEST_F(NodesTest, RejectsDifferentNumbersOfNodesOnAllNodes) {
  auto first = start(node_options(0, 3, "true"));
  auto second = start(node_options(1, 2, "true"));
  for (const LauncherResult& result : {first->wait(), second->wait()}) {
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(
        result.err, HasSubstr("the nodes do not agree on the number of nodes"));
  }
}

TEST_F(NodesTest, RejectsOneNodeRankGivenTwice) {
  auto first = start(node_options(0, 3, "true"));
  auto second = start(node_options(1, 3, "true"));
  auto third = start(node_options(1, 3, "true"));
  for (auto* launcher : {&first, &second, &third}) {
    const LauncherResult result = (*launcher)->wait();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(
        result.err, HasSubstr("node rank 1 was given to two launchers"));
  }
}

TEST_F(NodesTest, ProgramMissingOnOneNodeEndsAll) {
  RunOptions options = node_options(0, 2, "exec sleep 30");
  auto first = start(options);
  options.node_rank = 1;
  options.program = "/no/such/program";
  auto second = start(options);
  for (const LauncherResult& result : {first->wait(), second->wait()}) {
    EXPECT_EQ(result.exit_code, 127);
    EXPECT_THAT(
        result.err, HasSubstr("node 1: cannot start \"/no/such/program\""));
  }
}

TEST_F(NodesTest, SurvivorsStopWhenTheChannelIsLost) {
  auto first = start(node_options(0, 2, ready_line() + "exec sleep 30"));
  auto second = start(node_options(1, 2, ready_line() + "exec sleep 30"));
  ASSERT_TRUE(wait_for_ranks(4));
  first->signal(SIGKILL);
  std::ofstream(dir_ / "channel/closed") << "";
  const LauncherResult result = second->wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.err,
      HasSubstr("tessera run: lost contact with the launcher of node 0: "
                "connection reset by peer"));
  EXPECT_THAT(
      result.err,
      HasSubstr("the ranks were stopped: 2 (SIGTERM), 3 (SIGTERM)."));
}

TEST_F(NodesTest, FailingEndpointProviderEndsAll) {
  const RunOptions options = node_options(0, 2, "true");
  LauncherProcess first([&] {
    FileChannel channel(dir_ / "channel");
    return run(
        options,
        [](int) -> Endpoint { throw std::runtime_error("port is taken"); },
        &channel);
  });
  auto second = start(node_options(1, 2, "true"));
  EXPECT_EQ(first.wait().exit_code, 1);
  const LauncherResult result = second->wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("port is taken"));
}

} // namespace
} // namespace tessera::launch
