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
using NeededUnit = GatherOrder::NeededUnit;
using Foreseen = std::vector<std::optional<int>>;

constexpr int kUnits = 8;

std::vector<int> any_order() {
  return *rc::gen::nonEmpty(
      rc::gen::container<std::vector<int>>(rc::gen::inRange(0, kUnits)));
}

constexpr int kNoUnit = kUnits + 1;

/// The next gather, as far as it is foreseen.
std::optional<int> next_of(GatherOrder& order) {
  const auto next = order.to_gather(false, kNoUnit, [](int) {
    return NeededUnit{.is_sharded = true, .may_be_gathered = true, .bytes = 1};
  });
  return next.empty() ? std::nullopt : std::optional(next.front());
}

/// One iteration: what was foreseen after each gather.
Foreseen run(GatherOrder& order, const std::vector<int>& units) {
  Foreseen foreseen;
  for (const int unit : units) {
    order.record(unit);
    foreseen.push_back(next_of(order));
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
  EXPECT_EQ(next_of(order), std::nullopt); // the next iteration may be another
  order.record(1);
  EXPECT_EQ(next_of(order), 2);
  EXPECT_EQ(next_of(order), 2);
  order.record(2);
  EXPECT_EQ(next_of(order), 3);
  order.forget(3);
  EXPECT_EQ(next_of(order), std::nullopt);
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
        foreseen.push_back(next_of(order));
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
      foreseen.push_back(next_of(order));
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
            const auto next = next_of(order);
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
    ASSERT_TRUE(next_of(order).has_value());
  }
  order.record(1);
  EXPECT_FALSE(next_of(order).has_value());
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

/// A model in use: which units are sharded, coming or full, and how large.
struct Model {
  enum class State { Sharded, Gathering, Full };

  GatherOrder order;
  std::vector<State> states = std::vector<State>(kUnits, State::Sharded);
  std::vector<int64_t> bytes = std::vector<int64_t>(kUnits, 1);
  int64_t overlap_bytes = 0;
  bool accumulates = false;
  bool may_be_gathered = true;
  int root = kNoUnit;

  NeededUnit describe(int unit) const {
    const State state = states[static_cast<size_t>(unit)];
    return {
        .is_root = unit == root,
        .is_full = state == State::Full,
        .is_sharded = state == State::Sharded,
        .may_be_gathered = may_be_gathered,
        .accumulates = accumulates,
        .bytes = bytes[static_cast<size_t>(unit)],
        .overlap_bytes = overlap_bytes};
  }
  std::vector<int> gather(bool in_backward, int in_use) {
    return order.to_gather(
        in_backward, in_use, [this](int unit) { return describe(unit); });
  }
  std::vector<int> free_at_end() {
    return order.to_free_at_end([this](int unit) { return describe(unit); });
  }
  void set(int unit, State state) {
    states[static_cast<size_t>(unit)] = state;
  }
};

/// Each once, so that nothing is needed again before it was freed.
std::vector<int> any_units() {
  return *rc::gen::nonEmpty(
      rc::gen::unique<std::vector<int>>(rc::gen::inRange(0, kUnits)));
}

TEST(GatherOrderTest, GathersAheadInOrderWithinItsBytesButTheNextUnitAlways) {
  check_property([] {
    Model model;
    const auto units = any_units();
    run(model.order, units);
    for (int64_t& bytes : model.bytes) {
      bytes = *rc::gen::inRange(1, 10);
    }
    model.overlap_bytes = *rc::gen::inRange(0, 30);
    model.order.record(units.front());
    const auto ahead = model.gather(*rc::gen::arbitrary<bool>(), units.front());
    const size_t left = units.size() - 1;
    RC_ASSERT(ahead.size() <= left);
    RC_ASSERT(std::equal(ahead.begin(), ahead.end(), units.begin() + 1));
    RC_ASSERT(ahead.empty() == (left == 0));
    const auto extra = [&](size_t count) { // all but the largest
      int64_t sum = 0;
      int64_t largest = 0;
      for (size_t i = 1; i <= count; ++i) {
        const int64_t bytes = model.bytes[static_cast<size_t>(units[i])];
        sum += bytes;
        largest = std::max(largest, bytes);
      }
      return sum - largest;
    };
    RC_ASSERT(extra(ahead.size()) <= model.overlap_bytes);
    if (ahead.size() < left) {
      RC_ASSERT(extra(ahead.size() + 1) > model.overlap_bytes);
    }
  });
}

TEST(GatherOrderTest, WithoutMemoryForOverlapGathersOneUnitAhead) {
  Model model;
  run(model.order, {0, 1, 2, 3});
  model.order.record(0);
  EXPECT_EQ(model.gather(false, 0), std::vector<int>{1});
  model.set(1, Model::State::Gathering);
  EXPECT_EQ(model.gather(false, 0), std::vector<int>());
}

TEST(GatherOrderTest, DoesNotGatherPastAUnitThatIsFreedAndNeededAgain) {
  Model model;
  model.overlap_bytes = 100;
  run(model.order, {0, 1, 2, 1, 0}); // forward and backward
  model.order.record(0);
  model.set(0, Model::State::Full);
  EXPECT_EQ(model.gather(false, 0), (std::vector<int>{1, 2}));
  model.order.record(1);
  model.set(1, Model::State::Full);
  model.set(2, Model::State::Gathering);
  EXPECT_EQ(model.gather(false, 1), std::vector<int>());
  model.order.record(2);
  model.set(1, Model::State::Sharded);
  model.set(0, Model::State::Sharded);
  EXPECT_EQ(model.gather(false, 2), (std::vector<int>{1, 0}));
}

TEST(GatherOrderTest, TheRootCostsNothingAhead) {
  Model model;
  model.root = 3;
  model.bytes[3] = 1000;
  run(model.order, {0, 3, 1, 2});
  model.order.record(0);
  EXPECT_EQ(model.gather(false, 0), (std::vector<int>{3, 1}));
}

TEST(GatherOrderTest, GathersNothingAheadThatMayNotBe) {
  Model model;
  model.may_be_gathered = false; // one rank, or written since forward
  run(model.order, {0, 1, 2});
  model.order.record(0);
  EXPECT_EQ(model.gather(false, 0), std::vector<int>());
}

TEST(GatherOrderTest, ABackwardThatReducesForeseesNothingBehindItsEnd) {
  Model model;
  model.overlap_bytes = 100;
  run(model.order, {0, 1, 2, 1, 0});
  for (const int unit : {0, 1, 2, 1}) {
    model.order.record(unit);
  }
  EXPECT_EQ(model.gather(true, 1), std::vector<int>{0});
  model.order.hold(0);
  EXPECT_EQ(model.free_at_end(), std::vector<int>{0});
}

TEST(GatherOrderTest, GradientsThatWaitLetTheNextForwardBeForeseen) {
  Model model;
  model.accumulates = true;
  model.overlap_bytes = 1;
  run(model.order, {4, 0, 1, 2, 1, 0}); // 4: the embedding
  for (const int unit : {4, 0, 1, 2, 1}) {
    model.order.record(unit);
  }
  model.set(1, Model::State::Full);
  model.order.hold(1);
  EXPECT_EQ(model.gather(true, 1), (std::vector<int>{0, 4}));
  EXPECT_TRUE(model.order.is_wanted(1)); // soon, and it is there
  model.order.hold(0);
  model.order.hold(4);
  model.order.record(0);
  model.set(0, Model::State::Full);
  model.set(4, Model::State::Gathering);
  EXPECT_EQ(model.gather(true, 0), std::vector<int>());
  EXPECT_EQ(model.free_at_end(), std::vector<int>());
  model.order.end_iteration();
  // Nothing frees what waits to be used, and each use is recorded.
  const auto not_needed = [](int) { return HeldUnit{}; };
  EXPECT_EQ(model.order.to_free(false, not_needed), std::vector<int>());
  model.order.record(4);
  EXPECT_EQ(model.gather(false, 4), std::vector<int>());
  EXPECT_TRUE(model.order.record_stayed(0));
  EXPECT_TRUE(model.order.record_stayed(1));
  EXPECT_EQ(model.gather(false, 1), std::vector<int>{2});
  EXPECT_EQ(
      model.order.to_free(false, not_needed), (std::vector<int>{4, 0, 1}));
}

TEST(GatherOrderTest, WhatStaysForTheNextIterationIsBoundedToo) {
  check_property([] {
    Model model;
    model.accumulates = true;
    model.overlap_bytes = *rc::gen::inRange(0, kUnits);
    const auto units = any_units();
    run(model.order, units);
    for (const int unit : units) {
      model.order.record(unit);
      model.order.hold(unit);
      model.set(unit, Model::State::Full);
    }
    const auto freed = model.free_at_end();
    // One in place of the unit in use, one ahead, and the memory for overlap.
    const auto stay =
        std::min(units.size(), static_cast<size_t>(2 + model.overlap_bytes));
    RC_ASSERT(
        freed ==
        std::vector<int>(
            units.begin() + static_cast<std::ptrdiff_t>(stay), units.end()));
  });
}

TEST(GatherOrderTest, AnOrderThatChangedKeepsNothingForTheNextIteration) {
  Model model;
  model.accumulates = true;
  run(model.order, {0, 1, 2});
  for (const int unit : {0, 2}) {
    model.order.record(unit);
    model.order.hold(unit);
  }
  EXPECT_EQ(model.gather(true, 2), std::vector<int>());
  EXPECT_EQ(model.free_at_end(), (std::vector<int>{0, 2}));
}

} // namespace
} // namespace tessera::engine
