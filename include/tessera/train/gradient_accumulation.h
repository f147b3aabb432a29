#pragma once

#include <tessera/api.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/module_ref.h>
#include <tessera/train/grad_scaler.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace tessera {

/// What GradientAccumulation does at the end of each accumulation.
struct TESSERA_API GradientAccumulationOptions {
  /// How many micro-batches make one step of the optimizers.
  TORCH_ARG(int64_t, steps) = 1;
  /// Clip gradients to this norm over all ranks before the step.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  TORCH_ARG(double, norm_type) = 2.0;
  /// Throw in place of a step if the norm is infinite or NaN. Needs max_norm,
  /// and no scaler.
  TORCH_ARG(bool, error_if_nonfinite) = false;
  /// Average gradients after each micro-batch instead of once per step. A
  /// sharded model then keeps shards of gradients between micro-batches instead
  /// of full gradients: less memory, more communication.
  TORCH_ARG(bool, sync_each_batch) = false;
  /// About how many samples a micro-batch has, for backward(loss, num_samples):
  /// the losses of the first step are weighted with it, those of later steps
  /// with what the step before had. It changes no gradient, but a float16
  /// gradient of a first step that is weighted too high overflows.
  TORCH_ARG(double, typical_samples) = 1;

 public:
  /// Scales losses and leaves out steps whose gradients are not finite;
  /// default: none. Must outlive the GradientAccumulation; the program calls
  /// none of its scale(), unscale_(), step() and update().
  GradientAccumulationOptions& scaler(GradScaler& scaler) {
    scaler_ = &scaler;
    return *this;
  }
  GradScaler* scaler() const {
    return scaler_;
  }

 private:
  GradScaler* scaler_ = nullptr;
};

/// Makes one step of several micro-batches, with the gradient that one large
/// batch would give: the mean over all samples of all micro-batches on all
/// ranks.
///
///   GradientAccumulation accumulation(
///       model, {optimizer},
///       GradientAccumulationOptions().steps(4).max_norm(1.0));
///   for (const Batch& batch : loader) {
///     const auto loss = loss_of(model->forward(batch.input), batch.target);
///     if (accumulation.backward(loss, batch.size())) {
///       ... // the optimizer has stepped: accumulation.grad_norm()
///     }
///   }
///   accumulation.flush();
///
/// It takes a sharded model (the whole model, not one of its units), a
/// DistributedDataParallel, or a plain model, whose gradients it leaves to this
/// rank. It turns the synchronisation of gradients on and off, weights losses,
/// drives the GradScaler, clips, steps and clears gradients: the program does
/// none of that. Micro-batches are counted from construction, a step or a
/// flush().
///
/// Each loss is the mean over the samples of its micro-batch (or over its
/// tokens: whatever the program counts). With backward(loss, num_samples)
/// micro-batches may have different numbers of samples, on different ranks too,
/// which costs one small reduction per step. With backward(loss) all count
/// alike.
///
/// All ranks of the model make the same calls. (With a DistributedDataParallel
/// that broadcasts no buffers, and without `sync_each_batch`, ranks may make
/// different numbers of backward(loss, num_samples) since the last step before
/// they call flush().) If a call throws, accumulated gradients
/// are dropped, and the next backward() begins a new step. Not thread-safe.
class TESSERA_API GradientAccumulation {
 public:
  /// Model and optimizers must outlive this object, which clears the
  /// gradients. Throws on every rank
  /// c10::ValueError for options out of range, for a module that a
  /// DistributedDataParallel trains (pass that), for units with different
  /// ranks, and for an optimizer that steps inside backward; DisagreementError
  /// if ranks pass different options. Collective.
  GradientAccumulation(
      ModuleRef model,
      OptimizerRefs optimizers,
      const GradientAccumulationOptions& options = {});
  template <class M>
  GradientAccumulation(
      DistributedDataParallel<M>& ddp,
      OptimizerRefs optimizers,
      const GradientAccumulationOptions& options = {})
      : GradientAccumulation(
            *ddp.module(),
            &ddp,
            std::move(optimizers),
            options) {}
  /// Turns synchronisation on again. Gradients of an unfinished step stay.
  ~GradientAccumulation();
  GradientAccumulation(const GradientAccumulation&) = delete;
  GradientAccumulation& operator=(const GradientAccumulation&) = delete;

  /// Runs the backward of a micro-batch of `num_samples` samples; the last one
  /// of a step then steps. Returns whether it did. A rank that has no samples
  /// left, but whose model needs all ranks, passes the loss of any batch whose
  /// gradients are finite, and 0.
  ///
  /// Throws what the backward throws. A negative number, and a step without
  /// a sample on any rank, is c10::ValueError on every rank, at the end of the
  /// step. Calls with and without a number in one step are c10::Error.
  bool backward(const at::Tensor& loss, int64_t num_samples);
  /// The same for micro-batches of equal weight.
  bool backward(const at::Tensor& loss);

  /// Steps with the micro-batches that have accumulated so far, for the end of
  /// an epoch: means are taken over these alone. If no rank has a micro-batch,
  /// makes no step and returns false. Collective.
  bool flush();
  /// Drops the gradients that have accumulated. Call it on every rank.
  void discard();

  /// Micro-batches since the last step.
  int64_t num_pending() const;
  /// Whether the next backward() steps.
  bool will_step() const {
    return num_pending() + 1 == steps();
  }
  int64_t steps() const;
  /// The norm before clipping in the last step; nothing without max_norm, or
  /// before the first step. Reads the device.
  std::optional<double> grad_norm() const;
  /// Whether the GradScaler left out the last step. May read the device.
  bool skipped() const;

 private:
  GradientAccumulation(
      torch::nn::Module& model,
      detail::DDPHandle* ddp,
      OptimizerRefs optimizers,
      const GradientAccumulationOptions& options);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
