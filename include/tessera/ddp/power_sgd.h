#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/ddp/comm_hook.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace tessera {

/// As Python's PowerSGDState.
struct TESSERA_API PowerSGDOptions {
  /// Columns of the factors. More: nearer to the average, and more to send.
  TORCH_ARG(int64_t, matrix_approximation_rank) = 1;
  /// Backwards that are averaged as they are before that. 2 at least with
  /// use_error_feedback or warm_start, which want buckets that stay.
  TORCH_ARG(int64_t, start_powerSGD_iter) = 1000;
  /// A gradient is compressed if that divides its elements by more than this.
  TORCH_ARG(double, min_compression_rate) = 2;
  /// What was lost is added to the next gradient of this rank. Takes a copy of
  /// the gradients in memory.
  TORCH_ARG(bool, use_error_feedback) = true;
  /// Factors start from the last ones, which makes them better from step to
  /// step.
  TORCH_ARG(bool, warm_start) = true;
  /// Added to norms, against division by zero; 0: by QR, which needs none.
  TORCH_ARG(double, orthogonalization_epsilon) = 0;
  /// Of the first factors; the same on all ranks.
  TORCH_ARG(int64_t, random_seed) = 0;
};

/// What PowerSGD keeps from one backward to the next.
class TESSERA_API PowerSGDState {
 public:
  /// Throws c10::ValueError for options out of range, DisagreementError if they
  /// differ between ranks. Collective.
  explicit PowerSGDState(
      const Group& group,
      const PowerSGDOptions& options = {});

  /// As given.
  const Group& group() const {
    return group_;
  }
  /// As given.
  const PowerSGDOptions& options() const {
    return options_;
  }
  /// Backwards so far.
  int64_t iteration() const {
    return iteration_;
  }
  /// What this rank's gradients of a bucket lost so far, flat; undefined if
  /// nothing was compressed yet.
  at::Tensor error(size_t bucket) const;

 private:
  friend class PowerSGD;

  Group group_;
  PowerSGDOptions options_;
  int64_t iteration_ = 0;
  uint64_t num_draws_ = 0; // of random factors
  std::map<size_t, at::Tensor> errors_; // by bucket
  std::map<size_t, std::vector<at::Tensor>> factors_; // by bucket, then matrix
};

/// PowerSGD (Vogels et al. 2019): a gradient is seen as a matrix, and the
/// average over the ranks is replaced by a product of two thin ones, which are
/// all that travels. What is too small for that, biases as a rule, is averaged.
/// The state is for one model.
///
///   auto state = std::make_shared<PowerSGDState>(
///       world, PowerSGDOptions().matrix_approximation_rank(4));
///   ddp.register_comm_hook(powerSGD_hook(state));
TESSERA_API CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);

/// The same with a whole bucket as one square matrix: less to send, and less
/// exact.
TESSERA_API CommHook
batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);

} // namespace tessera
