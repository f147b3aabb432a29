// Which rank orthogonalises which matrix, and which matrices travel together.
// Knows no LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::optim {

/// A matrix, and how many steps of the iteration it takes.
struct MatrixShape {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t ns_steps = 0;

  int64_t numel() const {
    return rows * columns;
  }
};

/// Multiplications that the matrix takes: three products in each step of the
/// iteration, and one for each element that is moved.
int64_t orthogonalization_cost(const MatrixShape& matrix);

/// Matrices that are sent to their owners in one exchange, by their positions,
/// in ascending order.
using MatrixBatch = std::vector<size_t>;

struct MatrixPlan {
  std::vector<int> owners; // by matrix: the rank that has all of it
  std::vector<MatrixBatch> batches; // each matrix is in one of them
};

/// The costliest matrix goes first, those of equal cost stay in their order;
/// each goes to the rank with the smallest cost so far, the lowest of those.
/// In a batch each rank owns its next matrices, the costliest first: one, and
/// more as long as the rank's own have no more than `batch_numel` elements
/// together. The plan depends on the arguments alone, so it is the same on all
/// ranks.
MatrixPlan plan_matrices(
    const std::vector<MatrixShape>& matrices,
    int num_ranks,
    int64_t batch_numel);

} // namespace tessera::optim
