#include "engine/reduction_order.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace tessera::engine {
namespace {

using Advance = ReductionOrder::Advance;

/// "2 to copies, 1 to leaves".
std::string text_of(const std::vector<Advance>& steps) {
  std::string text;
  for (const auto& [unit, to] : steps) {
    text += (text.empty() ? "" : ", ") + std::to_string(unit) +
        (to == Advance::To::Copies ? " to copies" : " to leaves");
  }
  return text;
}

void check_reductions(const std::function<void()>& property) {
  EXPECT_TRUE(rc::check(property));
}

TEST(ReductionOrderTest, WithoutMemoryForOverlapOneReductionIsInFlight) {
  ReductionOrder order;
  EXPECT_EQ(text_of(order.make_room(3, 10, 0)), "");
  order.start(3, 10, false);
  EXPECT_EQ(text_of(order.make_room(2, 10, 0)), "3 to leaves");
  order.start(2, 10, false);
  EXPECT_EQ(text_of(order.finish()), "2 to leaves");
  EXPECT_EQ(text_of(order.finish()), "");
}

TEST(ReductionOrderTest, AllButTheLargestTakeWhatOverlapMayTake) {
  ReductionOrder order;
  order.start(9, 100, false); // the output layer
  EXPECT_EQ(text_of(order.make_room(3, 10, 25)), "");
  order.start(3, 10, false);
  EXPECT_EQ(text_of(order.make_room(2, 10, 25)), "");
  order.start(2, 10, false);
  EXPECT_EQ(text_of(order.make_room(1, 10, 25)), "9 to leaves");
  order.start(1, 10, false);
  EXPECT_EQ(text_of(order.make_room(0, 10, 25)), "3 to leaves");
}

TEST(ReductionOrderTest, AReductionOverTheShardsGoesOnOverTheCopies) {
  ReductionOrder order;
  order.start(2, 10, true);
  EXPECT_EQ(text_of(order.make_room(1, 10, 1000)), "2 to copies");
  order.start(1, 10, true);
  EXPECT_EQ(text_of(order.make_room(0, 10, 1000)), "2 to leaves, 1 to copies");
  order.start(0, 10, true);
  EXPECT_EQ(text_of(order.finish()), "1 to leaves, 0 to copies, 0 to leaves");
}

TEST(ReductionOrderTest, AUnitThatIsUsedAgainEndsItsOwnReductionFirst) {
  ReductionOrder order;
  order.start(2, 10, false);
  order.start(1, 10, false);
  EXPECT_EQ(text_of(order.make_room(1, 10, 1000)), "2 to leaves, 1 to leaves");
  order.start(1, 10, true);
  EXPECT_EQ(text_of(order.make_room(0, 10, 0)), "1 to copies");
  EXPECT_EQ(text_of(order.make_room(1, 10, 0)), "1 to leaves");
}

TEST(ReductionOrderTest, ForgetsAUnitWhereverItIs) {
  ReductionOrder order;
  order.start(2, 10, true);
  order.make_room(1, 10, 0);
  order.start(1, 10, true);
  order.forget(2);
  order.forget(1);
  EXPECT_EQ(text_of(order.finish()), "");
}

TEST(ReductionOrderTest, EachReductionEndsOnceInOrderAndBytesAreBounded) {
  check_reductions([] {
    ReductionOrder order;
    const int64_t overlap_bytes = *rc::gen::inRange(0, 40);
    const bool goes_on = *rc::gen::arbitrary<bool>();
    const int count = *rc::gen::inRange(1, 20);
    std::vector<int64_t> in_flight; // full gradients, oldest first
    std::vector<int> ended;
    const auto carry_out = [&](const std::vector<Advance>& steps) {
      for (const auto& [unit, to] : steps) {
        if (to == Advance::To::Copies || !goes_on) {
          in_flight.erase(in_flight.begin());
        }
        if (to == Advance::To::Leaves) {
          ended.push_back(unit);
        }
      }
    };
    for (int unit = 0; unit < count; ++unit) {
      const int64_t bytes = *rc::gen::inRange(1, 20);
      carry_out(order.make_room(unit, bytes, overlap_bytes));
      order.start(unit, bytes, goes_on);
      in_flight.push_back(bytes);
      const int64_t all =
          std::accumulate(in_flight.begin(), in_flight.end(), int64_t{0});
      RC_ASSERT(
          all - *std::max_element(in_flight.begin(), in_flight.end()) <=
          overlap_bytes);
      if (goes_on) {
        RC_ASSERT(in_flight.size() == 1U);
      }
    }
    carry_out(order.finish());
    std::vector<int> all(static_cast<size_t>(count));
    std::iota(all.begin(), all.end(), 0);
    RC_ASSERT(ended == all);
  });
}

} // namespace
} // namespace tessera::engine
