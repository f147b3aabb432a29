#include <tessera/ddp/join.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::error_of;
using tessera::testing::on_ranks;
using ::testing::HasSubstr;

/// Adds up ones over all ranks, once per iteration: the number of ranks that
/// still train.
class Counter : public Joinable {
 public:
  explicit Counter(Group group) : group_(std::move(group)) {}

  double count(double own = 1) {
    Join::notify_join_context(*this);
    return shadow(own);
  }

  std::unique_ptr<JoinHook> join_hook(const JoinArguments& arguments) override {
    struct Hook : JoinHook {
      explicit Hook(Counter& owner) : counter(owner) {}
      void main_hook() override {
        ++counter.shadowed;
        counter.shadow(0);
      }
      void post_hook(bool is_last_joiner) override {
        counter.was_last = is_last_joiner;
      }
      Counter& counter;
    };
    const auto tag = arguments.find("tag");
    if (tag != arguments.end()) {
      seen_tag = std::any_cast<std::string>(tag->second);
    }
    return std::make_unique<Hook>(*this);
  }
  at::Device join_device() const override {
    return at::kCPU;
  }
  Group join_process_group() const override {
    return group_;
  }

  int shadowed = 0;
  std::optional<bool> was_last;
  std::string seen_tag;

 private:
  double shadow(double own) {
    const at::Tensor sum = torch::full({1}, own);
    group_.all_reduce(sum, ReduceOp::Sum, "counter");
    return sum.item<double>();
  }

  Group group_;
};

/// Rank r makes 3 + r iterations.
int iterations_of(int rank) {
  return 3 + rank;
}

TEST(JoinTest, RanksThatAreThroughShadowTheOthers) {
  on_ranks(4, [](const Group& world) {
    Counter first(world);
    Counter second(world);
    Join::run(
        {&first, &second},
        [&] {
          for (int i = 0; i < iterations_of(world.rank()); ++i) {
            const int at_work = i < 3 ? 4 : 4 - (i - 2);
            EXPECT_EQ(first.count(), at_work);
            EXPECT_EQ(second.count(), at_work);
          }
        },
        JoinOptions().arguments({{"tag", std::string("mine")}}));
    EXPECT_EQ(first.shadowed, 3 - world.rank());
    EXPECT_EQ(second.shadowed, first.shadowed);
    EXPECT_EQ(first.was_last, world.rank() == 3);
    EXPECT_EQ(second.seen_tag, "mine");
    EXPECT_EQ(first.active_join(), nullptr);
    EXPECT_EQ(first.count(), 4); // outside again
  });
}

TEST(JoinTest, CloseMayBeExplicitAndRepeated) {
  on_ranks(2, [](const Group& world) {
    Counter counter(world);
    Join join({&counter});
    for (int i = 0; i < iterations_of(world.rank()); ++i) {
      counter.count();
    }
    join.close();
    join.close();
    EXPECT_EQ(counter.shadowed, 1 - world.rank());
  });
}

TEST(JoinTest, EvenInputsLeaveEveryRankTheLast) {
  on_ranks(2, [](const Group& world) {
    Counter counter(world);
    Join::run({&counter}, [&] { counter.count(); });
    EXPECT_EQ(counter.was_last, true);
    EXPECT_EQ(counter.shadowed, 0);
  });
}

TEST(JoinTest, DisabledDoesNothing) {
  on_ranks(2, [](const Group& world) {
    Counter counter(world);
    Join::run(
        {&counter}, [&] { counter.count(); }, JoinOptions().enable(false));
    EXPECT_FALSE(counter.was_last.has_value());
    EXPECT_EQ(counter.active_join(), nullptr);
  });
}

TEST(JoinTest, EarlyTerminationThrowsOnEveryRank) {
  on_ranks(4, [](const Group& world) {
    Counter counter(world);
    int made = 0;
    const std::string error = error_of([&] {
      Join::run(
          {&counter},
          [&] {
            for (; made < (world.rank() == 2 ? 2 : 5); ++made) {
              counter.count();
            }
          },
          JoinOptions().throw_on_early_termination(true));
    });
    EXPECT_EQ(made, 2);
    EXPECT_THAT(
        error,
        HasSubstr(
            world.rank() == 2
                ? "Rank 2 exhausted all inputs."
                : "Detected at least one rank that exhausted inputs. Throwing across all ranks."));
    EXPECT_EQ(counter.count(), 4); // the group stays usable
  });
}

TEST(JoinTest, ABodyThatThrowsClosesNothing) {
  on_ranks(2, [](const Group& world) {
    Counter counter(world);
    EXPECT_EQ(
        error_of([&] {
          Join::run({&counter}, [] { throw std::runtime_error("mine"); });
        }),
        "mine");
    EXPECT_FALSE(counter.was_last.has_value());
    EXPECT_EQ(counter.count(), 2);
  });
}

TEST(JoinTest, RejectsNoJoinablesTwoGroupsAndTwice) {
  on_ranks(2, [](const Group& world) {
    Counter one(world);
    Counter other(world.alone());
    EXPECT_THROW(Join({}), c10::ValueError);
    EXPECT_THAT(
        error_of([&] {
          Join({&one, &other});
        }),
        HasSubstr("Using join context manager with multiple process groups"));
    EXPECT_THROW(Join({&one, &one}), c10::ValueError);
    EXPECT_EQ(one.active_join(), nullptr);
    EXPECT_EQ(one.count(), 2);
  });
}

} // namespace
} // namespace tessera
