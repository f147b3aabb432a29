#include "zero/owner_assignment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <numeric>

namespace tessera::zero {
namespace {

using ::testing::ElementsAre;

TEST(OwnerAssignmentTest, TheLargestGoesToTheRankWithTheFewest) {
  OwnerAssignment owners(2);
  EXPECT_THAT(
      owners.add_group({3, 10, 4, 4}),
      ElementsAre(
          Ownership{1, 0}, Ownership{2, 1}, Ownership{3, 1}, Ownership{0, 1}));
  // Rank 0 has 10 elements, rank 1 has 11.
  EXPECT_THAT(
      owners.add_group({1, 2}), ElementsAre(Ownership{1, 0}, Ownership{0, 1}));
}

TEST(OwnerAssignmentTest, ParametersWithoutElementsStayOnTheLowestRank) {
  EXPECT_THAT(
      OwnerAssignment(3).add_group({0, 0}),
      ElementsAre(Ownership{0, 0}, Ownership{1, 0}));
}

TEST(OwnerAssignmentTest, AnyNumberOfRanksIsCheap) {
  EXPECT_THAT(
      OwnerAssignment(int64_t{1} << 40).add_group({1, 2}),
      ElementsAre(Ownership{1, 0}, Ownership{0, 1}));
}

/// The rule in its plainest form.
std::vector<Ownership> by_the_rule(
    const std::vector<int64_t>& numels,
    std::vector<int64_t>& loads) {
  std::vector<size_t> order(numels.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return numels[a] > numels[b];
  });
  std::vector<Ownership> result;
  for (const size_t param : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += numels[param];
    result.push_back({param, least - loads.begin()});
  }
  return result;
}

TEST(OwnerAssignmentTest, IsTheRule) {
  EXPECT_TRUE(rc::check([] {
    const int num_ranks = *rc::gen::inRange(1, 9);
    const auto groups = *rc::gen::container<std::vector<std::vector<int64_t>>>(
        rc::gen::container<std::vector<int64_t>>(
            rc::gen::inRange<int64_t>(0, 12)));
    OwnerAssignment owners(num_ranks);
    std::vector<int64_t> loads(static_cast<size_t>(num_ranks), 0);
    for (const auto& group : groups) {
      RC_ASSERT(owners.add_group(group) == by_the_rule(group, loads));
    }
  }));
}

} // namespace
} // namespace tessera::zero
