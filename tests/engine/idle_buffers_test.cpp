#include "engine/idle_buffers.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <map>
#include <memory>

namespace tessera::engine {
namespace {

TEST(IdleBuffersTest, GivesBackWhatItWasGivenOfThatSize) {
  IdleBuffers<int> idle;
  idle.give(8, 1);
  idle.give(16, 2);
  EXPECT_EQ(idle.take(16), 2);
  EXPECT_EQ(idle.take(16), std::nullopt);
  EXPECT_EQ(idle.take(8), 1);
}

TEST(IdleBuffersTest, DestroysWhatItDoesNotKeep) {
  IdleBuffers<std::shared_ptr<int>> idle;
  for (size_t i = 0; i < IdleLimits::kDuringStep; ++i) {
    EXPECT_TRUE(idle.give(8, nullptr));
  }
  const auto buffer = std::make_shared<int>();
  EXPECT_FALSE(idle.give(8, buffer));
  EXPECT_EQ(buffer.use_count(), 1);
}

TEST(IdleBuffersTest, KeepsNoMoreThanItsLimits) {
  EXPECT_TRUE(rc::check([] {
    IdleBuffers<int> idle;
    std::map<size_t, size_t> expected; // by size
    for (const auto& [size, verb] :
         *rc::gen::container<std::vector<std::pair<size_t, int>>>(rc::gen::pair(
             rc::gen::inRange<size_t>(1, 4), rc::gen::inRange(0, 8)))) {
      if (verb == 0) {
        idle.trim(IdleLimits::kBetweenSteps);
        for (auto& [bytes, count] : expected) {
          count = std::min(count, IdleLimits::kBetweenSteps);
        }
      } else if (verb < 3) {
        const bool is_there = expected[size] > 0;
        RC_ASSERT(idle.take(size).has_value() == is_there);
        expected[size] -= is_there ? 1 : 0;
      } else {
        const bool has_room = expected[size] < IdleLimits::kDuringStep;
        RC_ASSERT(idle.give(size, 0) == has_room);
        expected[size] += has_room ? 1 : 0;
      }
    }
    std::map<size_t, size_t> found;
    idle.for_each([&](int, size_t size) { ++found[size]; });
    std::erase_if(expected, [](const auto& one) { return one.second == 0; });
    RC_ASSERT(found == expected);
  }));
}

} // namespace
} // namespace tessera::engine
