#include "launch/run_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <functional>
#include <string>

namespace tessera::launch {
namespace {

using testing::HasSubstr;

std::string refusal(const std::function<void(RunOptions*)>& change) {
  RunOptions options;
  options.program = "train";
  change(&options);
  try {
    validate(options);
  } catch (const InvalidRunOptions& error) {
    return error.what();
  }
  return "accepted";
}

TEST(OptionsTest, AcceptsDefaults) {
  EXPECT_EQ(refusal([](RunOptions*) {}), "accepted");
}

TEST(OptionsTest, RejectsWhatCannotRun) {
  EXPECT_THAT(
      refusal([](RunOptions* o) { o->program = ""; }),
      HasSubstr("no program was given"));
  EXPECT_THAT(
      refusal([](RunOptions* o) { o->ranks_per_node = 0; }),
      HasSubstr("ranks per node is 0, must be at least 1"));
  EXPECT_THAT(
      refusal([](RunOptions* o) { o->num_nodes = -1; }),
      HasSubstr("number of nodes is -1"));
  EXPECT_THAT(
      refusal([](RunOptions* o) {
        o->num_nodes = 2;
        o->node_rank = 2;
      }),
      HasSubstr("node rank is 2 with 2 node(s), must be 0 to 1"));
  EXPECT_THAT(
      refusal([](RunOptions* o) {
        o->num_nodes = 1 << 20;
        o->ranks_per_node = 1 << 20;
      }),
      HasSubstr("more ranks than"));
  EXPECT_THAT(
      refusal([](RunOptions* o) { o->max_restarts = -1; }),
      HasSubstr("max restarts is -1"));
  EXPECT_THAT(
      refusal([](RunOptions* o) { o->cpu_threads = 0; }),
      HasSubstr("CPU threads per rank is 0"));
  EXPECT_THAT(
      refusal([](RunOptions* o) { o->log_dir = ""; }),
      HasSubstr("log folder is an empty path"));
}

TEST(OptionsTest, RejectsVariablesThatAreComputed) {
  EXPECT_THAT(
      refusal([](RunOptions* o) { o->extra_env["RANK"] = "1"; }),
      HasSubstr("the variable RANK is computed"));
  EXPECT_THAT(
      refusal([](RunOptions* o) { o->extra_env["A=B"] = "1"; }),
      HasSubstr("not a variable name"));
}

TEST(OptionsTest, CpuThreadsDefaultDividesTheCoresOfThisProcess) {
  cpu_set_t saved;
  ASSERT_EQ(sched_getaffinity(0, sizeof(saved), &saved), 0);
  const int num_cores = CPU_COUNT(&saved);
  EXPECT_EQ(default_cpu_threads(1), num_cores);
  EXPECT_EQ(default_cpu_threads(2), std::max(1, num_cores / 2));
  EXPECT_EQ(default_cpu_threads(num_cores + 1), 1);

  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<size_t>(cpu), &saved)) {
      CPU_SET(static_cast<size_t>(cpu), &one);
      break;
    }
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(default_cpu_threads(1), 1);
  sched_setaffinity(0, sizeof(saved), &saved);
}

} // namespace
} // namespace tessera::launch
