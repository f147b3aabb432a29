#include "engine/gather_order.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <vector>

namespace tessera::engine {
namespace {

using HeldUnit = GatherOrder::HeldUnit;
using Foreseen = std::vector<std::optional<int>>;

constexpr int kUnits = 8;

std::vector<int> any_order() {
  return *rc::gen::nonEmpty(
      rc::gen::container<std::vector<int>>(rc::gen::inRange(0, kUnits)));
}

/// One iteration: what was foreseen after each gather.
Foreseen run(GatherOrder& order, const std::vector<int>& units) {
  Foreseen foreseen;
  for (const int unit : units) {
    order.record(unit);
    foreseen.push_back(order.foreseen());
  }
  order.end_iteration();
  return foreseen;
}

/// Each gather foresees the next; the last one none.
Foreseen all_of(const std::vector<int>& units) {
  Foreseen expected(units.begin() + 1, units.end());
  expected.push_back(std::nullopt);
  return expected;
}

void check_property(const std::function<void()>& property) {
  EXPECT_TRUE(rc::check(property));
}

TEST(GatherOrderTest, ForeseesNothingInAFirstIteration) {
  check_property([] {
    GatherOrder order;
    const auto units = any_order();
    RC_ASSERT(run(order, units) == Foreseen(units.size(), std::nullopt));
  });
}

TEST(GatherOrderTest, ForeseesEachGatherOfAnIterationThatComesAgain) {
  check_property([] {
    GatherOrder order;
    const auto units = any_order();
    run(order, units);
    RC_ASSERT(run(order, units) == all_of(units));
    RC_ASSERT(run(order, units) == all_of(units));
  });
}

TEST(GatherOrderTest, GoesOnForeseeingUntilTheNextGather) {
  GatherOrder order;
  run(order, {1, 2, 3});
  EXPECT_EQ(
      order.foreseen(), std::nullopt); // the next iteration may be another
  order.record(1);
  EXPECT_EQ(order.foreseen(), 2);
  EXPECT_EQ(order.foreseen(), 2);
  order.record(2);
  EXPECT_EQ(order.foreseen(), 3);
  order.forget(3);
  EXPECT_EQ(order.foreseen(), std::nullopt);
}

TEST(GatherOrderTest, ForeseesNothingMoreOnceTheOrderChanged) {
  check_property([] {
    GatherOrder order;
    auto units = any_order();
    run(order, units);
    const auto changed = *rc::gen::inRange<size_t>(0, units.size());
    RC_PRE(changed > 0); // the first unit tells iterations apart
    const auto before = units;
    units[changed] = (units[changed] + 1) % kUnits;
    auto expected = all_of(before);
    std::fill(
        expected.begin() + static_cast<std::ptrdiff_t>(changed),
        expected.end(),
        std::nullopt);
    RC_ASSERT(run(order, units) == expected);
    RC_ASSERT(run(order, units) == all_of(units)); // the new order is known
  });
}

TEST(GatherOrderTest, TellsIterationsApartByTheirFirstUnit) {
  check_property([] {
    GatherOrder order;
    const auto one = any_order();
    const auto other = any_order();
    RC_PRE(one.front() != other.front());
    run(order, one);
    run(order, other);
    RC_ASSERT(run(order, one) == all_of(one));
    RC_ASSERT(run(order, other) == all_of(other));
  });
}

/// As the root of an accumulation: only its first iteration gathers it.
TEST(GatherOrderTest, AUnitThatStayedIsRecordedWhereItIsUsedFirst) {
  check_property([] {
    GatherOrder order;
    const auto others = any_order();
    std::vector<int> units = others;
    const auto place = *rc::gen::inRange<size_t>(0, units.size() + 1);
    const auto root =
        units.insert(units.begin() + static_cast<int64_t>(place), kUnits);
    order.hold(*root);
    run(order, units);
    for (int again = 0; again < 2; ++again) {
      Foreseen foreseen;
      for (const int unit : units) {
        if (unit == kUnits) {
          RC_ASSERT(order.record_stayed(unit));
        } else {
          order.record(unit);
        }
        foreseen.push_back(order.foreseen());
      }
      RC_ASSERT(!order.record_stayed(kUnits));
      order.end_iteration();
      RC_ASSERT(foreseen == all_of(units));
    }
    order.free(kUnits);
    RC_ASSERT(!order.record_stayed(kUnits));
  });
}

TEST(GatherOrderTest, ForeseesPastTheGapOfADeadUnit) {
  check_property([] {
    GatherOrder order;
    const auto units = any_order();
    const int dead = *rc::gen::inRange(0, kUnits);
    RC_PRE(units.front() != dead);
    run(order, units);
    order.forget(dead);
    Foreseen expected = all_of(units);
    std::replace(
        expected.begin(),
        expected.end(),
        std::optional<int>(dead),
        std::optional<int>());
    Foreseen foreseen;
    for (const int unit : units) {
      if (unit == dead) { // nobody can touch it, so the order changes
        break;
      }
      order.record(unit);
      foreseen.push_back(order.foreseen());
    }
    expected.resize(foreseen.size());
    RC_ASSERT(foreseen == expected);
  });
}

TEST(GatherOrderTest, ForgetsAnIterationWhoseFirstUnitDied) {
  GatherOrder order;
  run(order, {1, 2, 3});
  order.forget(1);
  EXPECT_EQ(run(order, {2, 3}), (Foreseen{std::nullopt, std::nullopt}));
  EXPECT_EQ(run(order, {1, 2, 3}), Foreseen(3, std::nullopt));
}

TEST(GatherOrderTest, NeverForeseesADeadUnit) {
  check_property([] {
    GatherOrder order;
    std::set<int> dead;
    for (int step = *rc::gen::inRange(0, 60); step > 0; --step) {
      const int unit = *rc::gen::inRange(0, kUnits);
      switch (*rc::gen::inRange(0, 8)) {
        case 0:
          order.end_iteration();
          break;
        case 1:
          order.forget(unit);
          dead.insert(unit);
          break;
        default:
          if (!dead.contains(unit)) {
            order.record(unit);
            const auto next = order.foreseen();
            RC_ASSERT(!next || !dead.contains(*next));
          }
      }
    }
  });
}

TEST(GatherOrderTest, RecoveryForgetsOrdersAndKeepsWhatIsHeld) {
  check_property([] {
    GatherOrder order;
    const auto units = any_order();
    run(order, units);
    order.record(units.front());
    order.hold(units.front());
    order.forget_orders();
    RC_ASSERT(order.held() == std::vector<int>{units.front()});
    RC_ASSERT(run(order, units) == Foreseen(units.size(), std::nullopt));
  });
}

TEST(GatherOrderTest, ARecordHasAnEnd) {
  GatherOrder order;
  for (size_t i = 0; i < GatherOrder::kMaxRecord + 10; ++i) {
    order.record(static_cast<int>(i % 2));
  }
  order.end_iteration();
  for (size_t i = 0; i + 1 < GatherOrder::kMaxRecord; ++i) {
    order.record(static_cast<int>(i % 2));
    ASSERT_TRUE(order.foreseen().has_value());
  }
  order.record(1);
  EXPECT_FALSE(order.foreseen().has_value());
}

/// Holdings of all units, and the units held, oldest first.
struct Room {
  GatherOrder order;
  std::vector<HeldUnit> holdings = std::vector<HeldUnit>(kUnits);

  std::vector<int> free(bool in_backward) const {
    return order.to_free(in_backward, [&](int unit) {
      return holdings[static_cast<size_t>(unit)];
    });
  }
  bool is_needed(int unit) const {
    const HeldUnit& held = holdings[static_cast<size_t>(unit)];
    return held.is_touched || held.is_above || held.is_gathering ||
        held.is_kept;
  }
};

Room any_room() {
  Room room;
  for (const int unit :
       *rc::gen::unique<std::vector<int>>(rc::gen::inRange(0, kUnits))) {
    room.order.hold(unit);
    auto& held = room.holdings[static_cast<size_t>(unit)];
    held.is_touched = *rc::gen::inRange(0, 4) == 0;
    held.is_above = *rc::gen::inRange(0, 4) == 0;
    held.is_gathering = *rc::gen::inRange(0, 4) == 0;
    held.is_kept = *rc::gen::inRange(0, 4) == 0;
  }
  return room;
}

TEST(GatherOrderTest, ForwardFreesAllThatIsNotNeeded) {
  check_property([] {
    const Room room = any_room();
    std::vector<int> expected(
        room.order.held().rbegin(), room.order.held().rend());
    std::erase_if(expected, [&](int unit) { return room.is_needed(unit); });
    RC_ASSERT(room.free(false) == expected);
  });
}

TEST(GatherOrderTest, BackwardKeepsTheNewestBesideWhatIsNeeded) {
  check_property([] {
    const Room room = any_room();
    auto expected = room.free(false);
    const auto kept = std::min<size_t>(
        expected.size(), static_cast<size_t>(GatherOrder::kKeptInBackward));
    expected.erase(
        expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(kept));
    RC_ASSERT(room.free(true) == expected);
  });
}

TEST(GatherOrderTest, HoldsWhatWasNotFreed) {
  GatherOrder order;
  for (const int unit : {3, 1, 2}) {
    order.hold(unit);
  }
  order.free(1);
  order.forget(3);
  EXPECT_EQ(order.held(), std::vector<int>{2});
}

} // namespace
} // namespace tessera::engine
