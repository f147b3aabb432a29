#include "comm/shm/op_queue.h"

#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <vector>

namespace tessera::comm::shm {
namespace {

using std::chrono::milliseconds;

TEST(OpQueueTest, RunsInOrderWhoeverRuns) {
  OpQueue queue;
  std::vector<int> order;
  std::vector<OpQueue::TaskPtr> tasks;
  for (int i = 0; i < 200; ++i) {
    if (i % 10 == 9) {
      queue.run_now([&order, i] { order.push_back(i); });
    } else {
      tasks.push_back(queue.submit([&order, i] { order.push_back(i); }, {}));
      if (i % 3 == 0) {
        queue.finish(tasks.back());
      }
    }
  }
  queue.finish(tasks.back());
  ASSERT_EQ(order.size(), 200u);
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(order[static_cast<size_t>(i)], i);
  }
}

TEST(OpQueueTest, ProgressesWithoutAnybodyWaiting) {
  OpQueue queue;
  std::atomic<int> calls{0};
  auto task = queue.submit([&] { ++calls; }, [&] { ++calls; });
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (calls != 2 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(task->done());
}

/// The background thread may go on with an operation whose peer never comes.
TEST(OpQueueTest, AWaitEndsWithItsOperationThoughTheNextOneLasts) {
  for (int i = 0; i < 20; ++i) {
    OpQueue queue;
    std::atomic<bool> begun{false};
    std::atomic<bool> returned{false};
    bool was_waited_for = false;
    auto first = queue.submit(
        [&] {
          begun = true;
          std::this_thread::sleep_for(milliseconds(5));
        },
        {});
    while (!begun) { // on the background thread
      std::this_thread::yield();
    }
    auto second = queue.submit(
        [&] {
          const auto limit =
              std::chrono::steady_clock::now() + std::chrono::seconds(20);
          while (!returned && std::chrono::steady_clock::now() < limit) {
            std::this_thread::sleep_for(milliseconds(1));
          }
          was_waited_for = !returned;
        },
        {});
    queue.finish(first);
    returned = true;
    queue.finish(second);
    ASSERT_FALSE(was_waited_for);
  }
}

TEST(OpQueueTest, KeepsWhatAnOperationThrew) {
  OpQueue queue;
  auto task = queue.submit([] { throw std::runtime_error("no"); }, {});
  queue.finish(task);
  EXPECT_THROW(std::rethrow_exception(task->error()), std::runtime_error);
  EXPECT_THROW(
      queue.run_now([] { throw std::logic_error("neither"); }),
      std::logic_error);
  bool ran = false;
  queue.run_now([&] { ran = true; });
  EXPECT_TRUE(ran);
}

TEST(OpQueueTest, OperationsThatNeverBeganFailWhenItStops) {
  OpQueue queue;
  std::atomic<bool> begun{false};
  std::atomic<bool> release{false};
  auto first = queue.submit(
      [&] {
        begun = true;
        while (!release) {
          std::this_thread::yield();
        }
      },
      {});
  while (!begun) {
    std::this_thread::yield();
  }
  auto second = queue.submit([] {}, {});
  std::thread releaser([&] {
    std::this_thread::sleep_for(milliseconds(20));
    release = true;
  });
  queue.stop();
  releaser.join();
  EXPECT_TRUE(first->done());
  EXPECT_FALSE(first->error());
  EXPECT_TRUE(second->done());
  EXPECT_TRUE(second->error());
}

} // namespace
} // namespace tessera::comm::shm
