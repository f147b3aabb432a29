#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(AgreeTest, SaysNothingWhenAllAgree) {
  on_ranks(4, [](const Group& world) {
    agree(world, "fully_shard", {"fc.weight [8, 4]", "fc.bias [8]"});
    agree(world, "fully_shard", {});
  });
}

TEST(AgreeTest, NamesTheFirstDifferenceOnEveryRank) {
  on_ranks(3, [](const Group& world) {
    try {
      agree(
          world,
          "fully_shard",
          {"fc.weight [8, 4]",
           world.rank() == 1 ? "fc.bias [9]" : "fc.bias [8]",
           "rank " + std::to_string(world.rank())});
      FAIL() << "nothing was thrown";
    } catch (const DisagreementError& error) {
      const std::string what = error.what();
      EXPECT_THAT(what, HasSubstr("[fully_shard] rank"));
      EXPECT_THAT(what, HasSubstr("ranks 0, 2: fc.bias [8]"));
      EXPECT_THAT(what, HasSubstr("rank 1: fc.bias [9]"));
      EXPECT_THAT(what, Not(HasSubstr("fc.weight")));
    }
  });
}

TEST(AgreeTest, AListThatEndsEarlyIsADifference) {
  on_ranks(2, [](const Group& world) {
    std::vector<std::string> items{"a"};
    if (world.rank() == 1) {
      items.push_back("b");
    }
    try {
      agree(world, "x", items);
      FAIL() << "nothing was thrown";
    } catch (const DisagreementError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 0: nothing (its list ends)"));
      EXPECT_THAT(error.what(), HasSubstr("rank 1: b"));
    }
  });
}

TEST(AgreeTest, ItemsAreComparedOneByOne) {
  on_ranks(2, [](const Group& world) {
    const std::vector<std::string> one{"a\nb"};
    const std::vector<std::string> two{"a", "b"};
    EXPECT_THROW(
        agree(world, "x", world.rank() == 0 ? one : two), DisagreementError);
    const std::vector<std::string> ends{"a", "nothing (its list ends)"};
    const std::vector<std::string> shorter{"a"};
    EXPECT_THROW(
        agree(world, "x", world.rank() == 0 ? ends : shorter),
        DisagreementError);
  });
}

TEST(AgreeTest, OneRanksErrorIsEverybodys) {
  on_ranks(4, [](const Group& world) {
    fail_together(world, "load", std::nullopt);
    std::optional<std::string> error;
    if (world.rank() == 2) {
      error = "cannot open step_10/.metadata.";
    }
    try {
      fail_together(world, "load", error);
      FAIL() << "nothing was thrown";
    } catch (const c10::Error& thrown) {
      EXPECT_THAT(
          thrown.what(),
          HasSubstr("rank 2 failed: cannot open step_10/.metadata."));
      EXPECT_THAT(thrown.what(), Not(HasSubstr("rank 1 failed")));
    }
    world.barrier();
  });
}

TEST(AgreeTest, AGroupOfOneAgreesWithItself) {
  on_ranks(1, [](const Group& world) {
    agree(world, "x", {"a"});
    fail_together(world, "x", std::nullopt);
    EXPECT_THROW(fail_together(world, "x", "no."), c10::Error);
  });
}

TEST(StepTokenTest, ARankThatSkipsABatchIsFoundWithinOneStep) {
  for (const char* backend : {"auto", "gloo"}) {
    on_ranks({.size = 3, .backend = backend}, [](const Group& world) {
      int64_t batch = 0;
      int64_t done = 0;
      std::string error;
      try {
        for (; batch < 10; ++batch) {
          try {
            if (batch == 4 && world.rank() == 1) {
              throw std::runtime_error("a file of this rank's is broken");
            }
          } catch (const std::runtime_error&) {
            continue;
          }
          step_token(batch);
          at::Tensor work = at::ones({8});
          world.all_reduce(work);
          ++done;
        }
      } catch (const DisagreementError& thrown) {
        error = thrown.what();
      }
      EXPECT_EQ(done, 4); // the step in which it happened is not made
      EXPECT_THAT(error, HasSubstr("ranks 0, 2: step 4"));
      EXPECT_THAT(error, HasSubstr("rank 1: step 5"));
    });
  }
}

TEST(StepTokenTest, IsAboutTheRanksOfItsGroup) {
  on_ranks(4, [](const Group& world) {
    const Group half = *world.split(world.rank() / 2);
    step_token(100 + world.rank() / 2, half);
    EXPECT_THROW(step_token(world.rank() / 2), DisagreementError);
    step_token(-1, world.alone());
  });
}

} // namespace
} // namespace tessera
