#include "optim/matrix_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <limits>

namespace tessera::optim {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

TEST(MatrixPlanTest, CostIsThreeProductsAStepAndTheElements) {
  // 4 x 10: x x^T, its square, and the square times x.
  const int64_t products = 4 * 4 * 10 + 4 * 4 * 4 + 4 * 4 * 10;
  EXPECT_EQ(orthogonalization_cost({4, 10, 5}), 5 * products + 40);
  EXPECT_EQ(orthogonalization_cost({10, 4, 5}), 5 * products + 40);
  EXPECT_EQ(orthogonalization_cost({10, 4, 0}), 40);
}

TEST(MatrixPlanTest, TheCostliestGoesToTheRankWithTheLeast) {
  // A square costs more than a longer, narrower one of as many elements.
  const std::vector<MatrixShape> matrices{
      {2, 32, 5}, {8, 8, 5}, {2, 32, 5}, {8, 8, 1}};
  EXPECT_THAT(
      plan_matrices(matrices, 2, kUnbounded).owners, ElementsAre(1, 0, 1, 1));
}

TEST(MatrixPlanTest, EqualMatricesGoRound) {
  const std::vector<MatrixShape> matrices(5, {4, 4, 5});
  const MatrixPlan plan = plan_matrices(matrices, 3, kUnbounded);
  EXPECT_THAT(plan.owners, ElementsAre(0, 1, 2, 0, 1));
  EXPECT_THAT(plan.batches, ElementsAre(ElementsAre(0, 1, 2, 3, 4)));
}

TEST(MatrixPlanTest, BatchesAreBoundedByRank) {
  const std::vector<MatrixShape> matrices(5, {4, 4, 5});
  const MatrixPlan plan = plan_matrices(matrices, 2, 32);
  EXPECT_THAT(plan.owners, ElementsAre(0, 1, 0, 1, 0));
  EXPECT_THAT(
      plan.batches, ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4)));
}

TEST(MatrixPlanTest, AMatrixAboveTheBoundTravelsByItself) {
  const std::vector<MatrixShape> matrices{{2, 2, 5}, {9, 9, 5}, {2, 2, 5}};
  const MatrixPlan plan = plan_matrices(matrices, 1, 8);
  EXPECT_THAT(plan.batches, ElementsAre(ElementsAre(1), ElementsAre(0, 2)));
}

TEST(MatrixPlanTest, NoMatricesHaveNoBatches) {
  EXPECT_TRUE(plan_matrices({}, 4, 8).batches.empty());
}

TEST(MatrixPlanTest, EachMatrixHasOneOwnerAndOneBatchWithinTheBounds) {
  EXPECT_TRUE(rc::check([] {
    const int num_ranks = *rc::gen::inRange(1, 9);
    const int64_t bound = *rc::gen::inRange<int64_t>(1, 200);
    const auto sides = *rc::gen::container<std::vector<std::pair<int, int>>>(
        rc::gen::pair(rc::gen::inRange(0, 20), rc::gen::inRange(0, 20)));
    std::vector<MatrixShape> matrices;
    int64_t largest_cost = 0;
    for (const auto& [rows, columns] : sides) {
      matrices.push_back({rows, columns, 5});
      largest_cost =
          std::max(largest_cost, orthogonalization_cost(matrices.back()));
    }
    const MatrixPlan plan = plan_matrices(matrices, num_ranks, bound);

    std::vector<size_t> seen;
    std::vector<int64_t> costs(static_cast<size_t>(num_ranks), 0);
    for (const MatrixBatch& batch : plan.batches) {
      RC_ASSERT(std::is_sorted(batch.begin(), batch.end()));
      std::vector<int64_t> numels(costs.size(), 0);
      std::vector<int> counts(costs.size(), 0);
      for (const size_t matrix : batch) {
        const auto owner = static_cast<size_t>(plan.owners[matrix]);
        numels[owner] += matrices[matrix].numel();
        counts[owner] += matrices[matrix].numel() > 0 ? 1 : 0;
        costs[owner] += orthogonalization_cost(matrices[matrix]);
        seen.push_back(matrix);
      }
      for (size_t rank = 0; rank < numels.size(); ++rank) {
        RC_ASSERT(numels[rank] <= bound || counts[rank] == 1);
      }
    }
    std::sort(seen.begin(), seen.end());
    for (size_t i = 0; i < seen.size(); ++i) {
      RC_ASSERT(seen[i] == i);
    }
    RC_ASSERT(seen.size() == matrices.size());
    // What "largest first, to the least" promises.
    const auto [least, most] = std::minmax_element(costs.begin(), costs.end());
    RC_ASSERT(*most - *least <= largest_cost);
  }));
}

} // namespace
} // namespace tessera::optim
