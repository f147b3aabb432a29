// Ranks that wait for each other in different calls find out before their
// timeout, where the backend does not compare calls; slow ranks are no error.
#include "comm/group/long_wait.h"

#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/diagnostics/describe_call.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using comm::Call;
using comm::LongWait;
using comm::RecentCalls;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Optional;

Call call_of(
    const char* operation,
    int64_t numel,
    uint64_t sequence,
    const char* label = "") {
  Call call = comm::describe_call(operation, at::empty({numel}), "SUM", label);
  call.sequence = sequence;
  return call;
}

/// Ranks 10, 11, ... that share a store.
struct Waiters {
  explicit Waiters(int count) : calls(count) {
    for (int rank = 0; rank < count; ++rank) {
      names.push_back(10 + rank);
    }
  }
  LongWait begin(int rank) {
    return {store, &calls[rank], rank, names};
  }
  /// What a rank finds in so many lookouts.
  std::optional<std::string> wait(int rank, int num_lookouts = 20) {
    LongWait wait = begin(rank);
    for (int i = 0; i < num_lookouts; ++i) {
      if (auto found = wait.look()) {
        return found;
      }
    }
    return std::nullopt;
  }

  comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::vector<RecentCalls> calls;
  std::vector<int> names;
};

TEST(LongWaitTest, CallsOfOneNumberThatDifferAreFound) {
  Waiters ranks(3);
  for (uint64_t i = 0; i < 100; ++i) {
    for (RecentCalls& calls : ranks.calls) {
      calls.note(call_of("all_reduce", 4, i));
    }
  }
  ranks.calls[0].note(call_of("all_reduce", 4, 100));
  ranks.calls[1].note(call_of("broadcast", 2, 100));
  ranks.calls[1].note(call_of("all_reduce", 4, 101)); // further ahead
  EXPECT_EQ(ranks.wait(0), std::nullopt); // nobody else waits yet
  const auto found = ranks.wait(1);
  EXPECT_THAT(
      found,
      Optional(AllOf(
          HasSubstr("different calls"),
          HasSubstr(
              "rank 10: all_reduce of Float [4] SUM (16 bytes), call #100"),
          HasSubstr("rank 11: broadcast of Float [2]"))));
  EXPECT_EQ(ranks.wait(0), found);
  EXPECT_EQ(ranks.wait(2), std::nullopt); // it has made no such call
}

TEST(LongWaitTest, AShortWaitTellsNobody) {
  Waiters ranks(2);
  ranks.calls[0].note(call_of("all_reduce", 4, 0));
  EXPECT_EQ(ranks.wait(0, 3), std::nullopt);
  EXPECT_FALSE(ranks.store->check({"recent_calls/0"}));
}

TEST(LongWaitTest, RanksThatAreAheadOrHaveOtherLabelsDoNotDiffer) {
  Waiters ranks(2);
  for (uint64_t i = 0; i < 5; ++i) {
    ranks.calls[0].note(call_of("all_reduce", 4, i, "mine"));
    ranks.calls[1].note(call_of("all_reduce", 4, i, "yours"));
  }
  for (uint64_t i = 5; i < 400; ++i) { // more than are kept
    ranks.calls[0].note(call_of("broadcast", 4, i));
  }
  EXPECT_EQ(ranks.wait(0), std::nullopt);
  EXPECT_EQ(ranks.wait(1), std::nullopt);
  EXPECT_EQ(ranks.wait(0), std::nullopt);
}

TEST(LongWaitTest, CallsThatTheRanksHaveComparedAreLeftOut) {
  Waiters ranks(2);
  for (int rank = 0; rank < 2; ++rank) {
    const Call call = call_of(rank == 0 ? "gather" : "reduce", 4, 0);
    ranks.calls[rank].note(call);
    ranks.calls[rank].forget(call);
    ranks.calls[rank].note(call_of("all_reduce", 4, 1));
  }
  EXPECT_EQ(ranks.wait(0), std::nullopt);
  EXPECT_EQ(ranks.wait(1), std::nullopt);
}

TEST(LongWaitTest, EveryRankOverGlooSaysWhichCallsDiffer) {
  on_ranks({.size = 4, .backend = "gloo"}, [](const Group& world) {
    const Group group = world.split(0).value(); // dead afterwards
    group.barrier();
    const at::Tensor tensor = at::ones({3});
    EXPECT_THAT(
        error_of([&] {
          if (world.rank() == 2) {
            group.all_gather_into(
                at::empty({12}), tensor, "what nobody else does");
          }
          group.all_reduce(tensor);
        }),
        AllOf(
            HasSubstr("ranks are at different calls"),
            HasSubstr("rank 2: all_gather_into of Float [3]"),
            HasSubstr("for \"what nobody else does\", call #"),
            HasSubstr(": all_reduce of Float [3] SUM")));
    EXPECT_THAT(
        error_of([&] { group.barrier(); }),
        AllOf(HasSubstr("failed earlier"), HasSubstr("different calls")));
    world.barrier();
  });
}

/// Gloo would end the process of a rank that gets too much, and mix up calls of
/// one size.
TEST(LongWaitTest, CallsOverGlooThatDifferNeverMeet) {
  on_ranks({.size = 2, .backend = "gloo"}, [](const Group& world) {
    const bool is_first = world.rank() == 0;
    const std::vector<std::function<void(const Group&)>> differing{
        [&](const Group& group) {
          group.all_reduce(at::ones({is_first ? 4 : 50000}));
        },
        [&](const Group& group) {
          group.all_reduce(
              at::ones({4}), is_first ? ReduceOp::Sum : ReduceOp::Max);
        },
        [&](const Group& group) {
          group.all_gather_into(
              at::empty({8}, is_first ? at::kInt : at::kFloat),
              at::empty({4}, is_first ? at::kInt : at::kFloat));
        }};
    for (const auto& call : differing) {
      const Group group = world.split(0).value();
      // Many under way, which are told apart by their numbers alone.
      std::vector<at::Tensor> tensors;
      std::vector<Work> works;
      for (int i = 0; i < 100; ++i) {
        tensors.push_back(torch::full({3}, i));
        works.push_back(group.all_reduce_async(tensors.back()));
      }
      for (int i = 99; i >= 0; --i) {
        works[i].wait();
        EXPECT_EQ(tensors[i][0].item<int>(), 2 * i);
      }
      EXPECT_THAT(
          error_of([&] { call(group); }),
          AllOf(
              HasSubstr("ranks are at different calls"),
              HasSubstr("rank 0: "),
              HasSubstr("rank 1: ")));
    }
  });
}

/// Each rank waits for the other for long, after calls that differed in a way
/// that the program handled.
TEST(LongWaitTest, ASlowRankIsNoError) {
  on_ranks({.size = 2, .backend = "gloo"}, [](const Group& world) {
    const at::Tensor tensor = at::ones({3});
    EXPECT_THROW(
        world.gather(
            world.rank() == 0 ? at::empty({5}) : at::Tensor(), tensor, 0),
        c10::Error);
    for (int slow = 0; slow < 2; ++slow) {
      if (world.rank() == slow) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1800));
      }
      world.all_reduce(tensor, ReduceOp::Sum, slow == 0 ? "a" : "b");
    }
    EXPECT_EQ(tensor[0].item<double>(), 4);
  });
}

} // namespace
} // namespace tessera
