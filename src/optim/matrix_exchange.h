// Makes matrices orthogonal whose parts lie on several ranks.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/exchange.h"
#include "optim/matrix_plan.h"
#include "optim/newton_schulz.h"

namespace tessera::optim {

/// A matrix in parts, and what is to be done to it.
struct CutMatrix {
  engine::Cut cut;
  NewtonSchulz iteration;
};

/// Sends the parts of each matrix to its owner and the parts of the result
/// back, batch by batch; see [Note: Muon on shards] and plan_matrices().
///
/// Exchanges of a batch have two buffers, what this rank has of the batch's
/// matrices and what it owns of them; results return in the same two.
class MatrixExchange {
 public:
  /// Writes this rank's part of a matrix to `to`: flat, bfloat16, perhaps
  /// empty.
  using Give = std::function<void(size_t matrix, const at::Tensor& to)>;
  /// Gets this rank's part of the result in the same form.
  using Take = std::function<void(size_t matrix, const at::Tensor& from)>;

  /// All ranks of the group pass the same matrices and `batch_bytes`, each its
  /// device.
  MatrixExchange(
      Group group,
      at::Device device,
      std::vector<CutMatrix> matrices,
      int64_t batch_bytes);

  /// Calls `give` and `take` once for each matrix, in the same order on all
  /// ranks: `give` may be called for later matrices before `take` is called for
  /// earlier ones. Collective.
  void run(const Give& give, const Take& take);

 private:
  struct Flight {
    const MatrixBatch* batch = nullptr;
    at::Tensor parts; // this rank's, by owner and matrix
    at::Tensor owned; // this rank's matrices, by sender and matrix
    Work work;
  };

  Flight send(const MatrixBatch& batch, const Give& give) const;
  void compute(Flight& flight) const;
  void send_back(Flight& flight) const;
  void finish(Flight& flight, const Take& take) const;

  std::vector<size_t> owned_in(const MatrixBatch& batch, int rank) const;
  /// Elements that this rank sends to each rank, and receives from each, on the
  /// way to the owners.
  std::vector<int64_t> sent_numels(const MatrixBatch& batch) const;
  std::vector<int64_t> received_numels(const MatrixBatch& batch) const;
  /// Calls `visit` for each of this rank's parts in Flight::parts.
  void for_each_part(
      const Flight& flight,
      const std::function<void(size_t matrix, const at::Tensor& part)>& visit)
      const;

  const Group group_;
  const at::Device device_;
  const std::vector<CutMatrix> matrices_;
  MatrixPlan plan_;
};

} // namespace tessera::optim
