#include "engine/order_check.h"

#include <tessera/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::engine {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using Event = OrderCheck::Event;
using Flags = std::vector<bool>;

TEST(OrderCheckTest, AcceptsRanksThatDidTheSame) {
  on_ranks(2, [](const Group& world) {
    OrderCheck check(world);
    check.note(Event::Gather, 0);
    check.note(Event::Reduction, 1);
    check.compare();
    check.note(Event::Summon, world.rank());
    check.reset(); // what came before an exception is not compared
    check.compare();
  });
}

TEST(OrderCheckTest, RejectsAnotherOrderOnEveryRank) {
  on_ranks(2, [](const Group& world) {
    OrderCheck check(world);
    check.note(Event::Gather, world.rank());
    check.note(Event::Gather, 1 - world.rank());
    EXPECT_THROW(check.compare(), DisagreementError);
    check.compare(); // and begins anew
  });
}

TEST(OrderCheckTest, RejectsAnotherEventOfTheSameUnit) {
  on_ranks(2, [](const Group& world) {
    OrderCheck check(world);
    check.note(world.rank() == 0 ? Event::Gather : Event::Reduction, 0);
    EXPECT_THROW(check.compare(), DisagreementError);
  });
}

TEST(OrderCheckTest, AHookThatThrewOnOneRankThrowsOnAll) {
  on_ranks(2, [](const Group& world) {
    OrderCheck check(world);
    if (world.rank() == 1) {
      check.note_failure(
          std::make_exception_ptr(std::runtime_error("of the user")));
    }
    const std::string said = error_of([&] { check.compare_with_use({true}); });
    EXPECT_THAT(
        said, HasSubstr(world.rank() == 1 ? "of the user" : "threw on rank 1"));
    EXPECT_FALSE(check.compare_with_use({true}).has_value());
  });
}

TEST(OrderCheckTest, ExchangesNothingWhereNoRankIsInDoubt) {
  on_ranks(2, [](const Group& world) {
    OrderCheck check(world);
    EXPECT_FALSE(check.compare_with_use({true, true}).has_value());
    EXPECT_FALSE(check.compare_with_use({}).has_value());
  });
}

TEST(OrderCheckTest, AUseOnAnyRankCounts) {
  on_ranks(2, [](const Group& world) {
    OrderCheck check(world);
    const bool first = world.rank() == 0;
    const auto used = check.compare_with_use({first, true, !first, false});
    ASSERT_TRUE(used.has_value());
    EXPECT_EQ(*used, (Flags{true, true, true, false}));
  });
}

TEST(OrderCheckTest, ARankAloneKnowsWhatItUsed) {
  on_ranks(1, [](const Group& world) {
    OrderCheck check(world);
    EXPECT_EQ(check.compare_with_use({true, false}), (Flags{true, false}));
  });
}

TEST(OrderCheckTest, IsDueAfterManyGathers) {
  on_ranks(1, [](const Group& world) {
    OrderCheck check(world);
    for (int i = 0; i < 63; ++i) {
      check.note(Event::Gather, i);
      check.note(Event::Reduction, i);
    }
    EXPECT_FALSE(check.is_due());
    check.note(Event::Gather, 63);
    EXPECT_TRUE(check.is_due());
    check.compare();
    EXPECT_FALSE(check.is_due());
  });
}

} // namespace
} // namespace tessera::engine
