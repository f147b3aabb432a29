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

/// Options of PowerSGDState, as in Python.
struct TESSERA_API PowerSGDOptions {
  /// Columns of the factors. More columns are nearer to the average, and more
  /// to send.
  TORCH_ARG(int64_t, matrix_approximation_rank) = 1;
  /// How many backwards are averaged without compression before PowerSGD
  /// starts. At least 2 with use_error_feedback or warm_start, which need final
  /// buckets.
  TORCH_ARG(int64_t, start_powerSGD_iter) = 1000;
  /// A gradient is compressed if that reduces its elements by more than this
  /// factor.
  TORCH_ARG(double, min_compression_rate) = 2;
  /// The error of a compression is added to the next gradient of this rank.
  /// Needs memory for a copy of the gradients.
  TORCH_ARG(bool, use_error_feedback) = true;
  /// Factors start from the previous ones, which improves them from step to
  /// step.
  TORCH_ARG(bool, warm_start) = true;
  /// Added to norms to avoid division by zero; 0 to orthogonalize by QR, which
  /// does not need it.
  TORCH_ARG(double, orthogonalization_epsilon) = 0;
  /// The seed of the first factors; the same on all ranks.
  TORCH_ARG(int64_t, random_seed) = 0;
};

/// The state that PowerSGD keeps from one backward to the next.
class TESSERA_API PowerSGDState {
 public:
  /// Throws c10::ValueError for options out of range, DisagreementError if they
  /// differ between ranks. Collective.
  explicit PowerSGDState(
      const Group& group,
      const PowerSGDOptions& options = {});

  /// The group as given.
  const Group& group() const {
    return group_;
  }
  /// The options as given.
  const PowerSGDOptions& options() const {
    return options_;
  }
  /// The number of backwards so far.
  int64_t iteration() const {
    return iteration_;
  }
  /// The accumulated compression error of this rank's gradients of a bucket,
  /// flat; undefined if nothing was compressed yet.
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

/// PowerSGD (Vogels et al. 2019): a gradient is treated as a matrix, and the
/// average over the ranks is replaced by a product of two thin matrices; only
/// these are sent. Gradients that are too small for that, usually biases, are
/// averaged. The state is for one model.
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
