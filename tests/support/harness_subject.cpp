// Tests that misbehave on purpose; harness_test runs them one by one.
#include <signal.h>
#include <unistd.h>

#include <stdexcept>

#include "support/ranks.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using tessera::testing::on_ranks;
using tessera::testing::RanksOptions;

TEST(Subject, Passes) {
  ::testing::Test::RecordProperty("outside", 1);
  on_ranks(4, [](const Group& world) {
    ::testing::Test::RecordProperty("leaf_runs", 7);
    EXPECT_EQ(world.size(), 4);
  });
}

TEST(Subject, FailsOnRankTwoOnly) {
  on_ranks(4, [](const Group& world) {
    EXPECT_NE(world.rank(), 2) << "two is bad";
    world.barrier();
  });
}

TEST(Subject, ThrowsOnRankOne) {
  on_ranks(2, [](const Group& world) {
    if (world.rank() == 1) {
      throw std::runtime_error("thrown on purpose");
    }
  });
}

TEST(Subject, HangsOnRankOne) {
  on_ranks(
      RanksOptions{.size = 3, .test_timeout = milliseconds(1500)},
      [](const Group& world) {
        world.barrier("before");
        if (world.rank() == 1) {
          pause();
        }
        world.barrier("after");
      });
}

TEST(Subject, IsKilledOnRankZero) {
  on_ranks(2, [](const Group& world) {
    if (world.rank() == 0) {
      raise(SIGKILL);
    }
  });
}

void leave_a_daemon() {
  if (fork() == 0) {
    if (fork() == 0) {
      close(0);
      sleep(30);
    }
    _exit(0);
  }
  usleep(100'000);
}

TEST(Subject, LeaksAProcessOnARank) {
  on_ranks(2, [](const Group& world) {
    if (world.rank() == 1) {
      leave_a_daemon();
    }
  });
}

TEST(Subject, LeaksAProcessInTheController) {
  leave_a_daemon();
}

} // namespace
} // namespace tessera
