#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

/// When a CapturedStep captures, and what it does if it cannot.
struct TESSERA_API CapturedStepOptions {
  /// Steps that are run eagerly before one is captured. They make what is made
  /// once: the state of the optimizers, workspaces of the device's libraries.
  TORCH_ARG(int64_t, warmup_steps) = 3;
  /// Throw if a step cannot be captured, instead of running it eagerly with a
  /// warning.
  TORCH_ARG(bool, require_capture) = false;
  /// How many graphs are kept. Another one takes the place of the one that was
  /// used longest ago.
  TORCH_ARG(int64_t, max_graphs) = 8;
};

/// Makes training steps with one launch each: records a step of the program as
/// a CUDA graph and replays it, so that the host has next to nothing to do
/// between two steps.
///
///   CapturedStep step(model, {optimizer}, [&](const auto& batch) {
///     auto loss = loss_of(model->forward(batch[0]), batch[1]);
///     loss.backward();
///     clip_grad_norm_(model, 1.0);
///     optimizer.step();
///     optimizer.zero_grad();
///     return loss.detach();
///   });
///   for (...) {
///     auto loss = step({ids, targets});
///     schedule.step();
///   }
///
/// The model may be sharded (fully_shard, FSDP) or that of a
/// DistributedDataParallel without a communication hook, on any number of
/// ranks; on one rank it may be plain. All ranks of the step are of one group,
/// and under DistributedDataParallel all parameters get gradients. The
/// optimizers are AdamW, Adam or SGD of tessera::optim, or NamedOptimizer or
/// ZeroRedundancyOptimizer over one; with a GradScaler, AdamW or Adam. A step
/// of several micro-batches is one function that runs them all. While a Join is
/// open, steps are eager.
///
/// The first calls run the function eagerly. Then a call captures: it runs the
/// function once, while the device records and does nothing, and replays what
/// was recorded. Later calls replay. A call whose inputs have other shapes,
/// and one after modes of modules, requires_grad, autocast or options of param
/// groups have changed, captures again; a graph is kept for each. All are
/// captured anew if the values of parameters, buffers or optimizer state lie
/// elsewhere (load_state_dict of an optimizer puts them there). Values may
/// change freely: weights loaded in place, learning rates, the generator's
/// seed.
///
/// In a replay nothing of the function runs on the host. So in the function:
/// - Only what the device does is repeated. A counter of your own that the
///   function counts, or a line that it prints, stays as it was; a capture runs
///   the function once more.
/// - Call zero_grad(), so that the step begins or ends without gradients.
/// - Use GradScaler and GradientAccumulation as elsewhere, for whole steps, but
///   pass no numbers of samples.
/// - Do not step schedules, set learning rates, update averages, add to
///   Metrics, or take batches from a Loader. Do so around the captured step.
///   Tessera's own throw if they are called while the step is captured.
/// - Do not read values (item(), nonzero(), printing a tensor). Do not write to
///   inputs.
/// - What the function uses beside model, optimizers and inputs (a table of
///   positions, weights of classes) must keep its memory as long as this object
///   lives.
/// The result is one tensor, which the call returns in memory of its own. An
/// input in pinned memory is copied while the call returns: do not write to it
/// before the device is through.
///
/// If a step cannot be captured, nothing of Tessera's has changed: gradients,
/// units, scalers and generators are as they were. The step then runs eagerly,
/// with one warning that names the operator or the call, and so do later steps
/// of its kind. Eager steps read the learning rate as the graph does, on the
/// device and there in float32.
///
/// Several ranks do the same in each call, all replay, capture or run eagerly:
/// they tell each other on the host what they need, so that a rank with another
/// shape makes all capture, and a rank that cannot capture makes all run
/// eagerly. Each rank calls this object for each step, and its function makes
/// the same forwards, backwards and collectives on all ranks: they compare what
/// they captured.
///
/// On the CPU, and in a build without CUDA's headers, a call runs the function.
/// Not thread-safe.
class TESSERA_API CapturedStep {
 public:
  /// What a step does; gets the inputs of the call, on the model's device if
  /// that can record.
  using Function =
      std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

  /// `optimizers` are all that the step steps. Model, optimizers and what the
  /// function uses must outlive this object; modules and parameters are those
  /// that the model has now, so shard it before. Throws c10::ValueError for
  /// options out of range. Not collective.
  CapturedStep(
      ModuleRef model,
      const OptimizerRefs& optimizers,
      Function step,
      const CapturedStepOptions& options = {});
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  /// Makes a step and returns its result. Does not wait for the device. Throws
  /// what the function throws when it runs eagerly, and with require_capture
  /// c10::Error, before anything has changed, if the step cannot be captured.
  /// Collective if the step is.
  at::Tensor operator()(const std::vector<at::Tensor>& inputs);

  /// Whether the last call replayed a graph: only once steps are captured.
  bool was_replayed() const;
  /// Why the last call ran eagerly; empty if it replayed.
  const std::string& eager_reason() const;
  /// How many graphs are kept: one for each kind of step.
  size_t num_graphs() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
