#include "optim/matrix_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace tessera::optim {
namespace {

/// By rank: its matrices, the costliest first.
using Queues = std::vector<std::vector<size_t>>;

Queues assign(const std::vector<MatrixShape>& matrices, int num_ranks) {
  std::vector<int64_t> costs;
  for (const MatrixShape& matrix : matrices) {
    costs.push_back(orthogonalization_cost(matrix));
  }
  std::vector<size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return costs[a] > costs[b];
  });
  using Load = std::pair<int64_t, size_t>; // cost, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  Queues queues(static_cast<size_t>(num_ranks));
  for (size_t rank = 0; rank < queues.size(); ++rank) {
    loads.emplace(0, rank);
  }
  for (const size_t matrix : order) {
    const auto [cost, rank] = loads.top();
    loads.pop();
    loads.emplace(cost + costs[matrix], rank);
    queues[rank].push_back(matrix);
  }
  return queues;
}

} // namespace

int64_t orthogonalization_cost(const MatrixShape& matrix) {
  const int64_t small = std::min(matrix.rows, matrix.columns);
  const int64_t large = std::max(matrix.rows, matrix.columns);
  return matrix.ns_steps * small * small * (2 * large + small) + matrix.numel();
}

MatrixPlan plan_matrices(
    const std::vector<MatrixShape>& matrices,
    int num_ranks,
    int64_t batch_numel) {
  MatrixPlan plan;
  plan.owners.resize(matrices.size());
  const Queues queues = assign(matrices, num_ranks);
  std::vector<size_t> taken(queues.size()); // of each queue
  for (size_t num_left = matrices.size(); num_left > 0;) {
    MatrixBatch batch;
    for (size_t rank = 0; rank < queues.size(); ++rank) {
      int64_t numel = 0;
      for (size_t& next = taken[rank]; next < queues[rank].size(); ++next) {
        const size_t matrix = queues[rank][next];
        numel += matrices[matrix].numel();
        if (numel > batch_numel && numel > matrices[matrix].numel()) {
          break;
        }
        plan.owners[matrix] = static_cast<int>(rank);
        batch.push_back(matrix);
      }
    }
    std::sort(batch.begin(), batch.end());
    num_left -= batch.size();
    plan.batches.push_back(std::move(batch));
  }
  return plan;
}

} // namespace tessera::optim
