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
  /// How many steps run eagerly before one is captured. They create what is
  /// created once: optimizer state, workspaces of the device's libraries. Later
  /// the first step of each kind runs eagerly, for the same reason.
  TORCH_ARG(int64_t, warmup_steps) = 3;
  /// Throw if a step cannot be captured, instead of running it eagerly with a
  /// warning. Steps that run eagerly by design do so all the same: the first
  /// steps, those inside a Join, and those that a timeline watches.
  TORCH_ARG(bool, require_capture) = false;
  /// How many graphs are kept. A further graph replaces the one that has not
  /// been used for the longest time.
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
/// ranks; on one rank it may be plain. All ranks of the step must be in one
/// group, and under DistributedDataParallel all parameters must get gradients.
/// The optimizers may be AdamW, Adam or SGD of tessera::optim, or a
/// NamedOptimizer or ZeroRedundancyOptimizer over one of them; with a
/// GradScaler, only AdamW or Adam. A step of several micro-batches is one
/// function that runs all of them. While a Join is open, and while a
/// StepMonitor makes a timeline, steps are eager.
///
/// The first calls run the function eagerly. Then a call captures: it runs the
/// function once, while the device records and does nothing, and replays what
/// was recorded. Later calls replay. Steps are of another kind if the shapes of
/// inputs, modes of modules, requires_grad, autocast, global switches (TF32,
/// backends of attention, deterministic algorithms) or options of param groups
/// other than the learning rate are different. The first step of a kind runs
/// eagerly, the second one captures another graph, and the graphs are kept. If
/// parameters, buffers or optimizer state have moved to other memory, as an
/// optimizer's load_state_dict() moves its state, all graphs are dropped, and
/// each kind begins with an eager step again. Values may change freely: weights
/// loaded in place, learning rates, the generator's seed.
///
/// A replay runs no part of the function on the host. So in the function:
/// - Only work of the device is repeated. A counter that the function increases
///   does not change in a replay, and a line that it prints is not printed; a
///   capture runs the function once more.
/// - Numbers and flags of the host that the function reads (the weight of a
///   loss, a temperature, a momentum outside of the param groups) keep the
///   values that they had in the capture. Pass what changes as an input, a
///   tensor.
/// - Compute gradients and use them in the same call, and call zero_grad(), so
///   that the step begins or ends without gradients.
/// - Use GradScaler and GradientAccumulation as elsewhere, for whole steps, but
///   pass no numbers of samples.
/// - Do not step schedules, set learning rates, update averages, add to
///   Metrics, or take batches from a Loader. Do so before or after the captured
///   step. Tessera's own classes throw if they are called while it is captured.
/// - Do not read values (item(), nonzero(), printing a tensor). Do not write to
///   inputs.
/// - Other tensors that the function uses besides the model, the optimizers and
///   the inputs (a table of positions, weights of classes) must keep their
///   memory as long as this object lives. Write their new values in place: what
///   replaces a tensor (`hidden_ = next.detach()`) replaces it in the capture
///   alone. That is an error for parameters and buffers of the model; members
///   that are not registered cannot be seen.
/// - A sharded module that the function uses must be part of the model: pass a
///   module that holds both.
/// The call returns one tensor, detached, which no later call overwrites. An
/// input in pinned memory may still be read after the call has returned: do not
/// write to it before the device has finished the step.
///
/// If a step cannot be captured, gradients, units, scalers and generators are
/// as they were before the attempt. The step then runs eagerly, with one
/// warning that names the operator or the call, and so do later steps of its
/// kind; after some hundred calls the capture is tried again. Eager steps read
/// the learning rate as the graph does: on the device, in float32.
///
/// Several ranks decide together in each call: all of them replay, capture or
/// run eagerly. If one rank has a new shape, all ranks run eagerly once and
/// capture the next time; if one rank cannot capture, all run eagerly. Every
/// rank must call this object for each step, and the function must make the
/// same forwards, backwards and collectives on every rank: the ranks compare
/// what they captured.
///
/// On the CPU, and in a build without CUDA's headers, a call just runs the
/// function.
///
/// Memory: the constructor and each capture give the free memory of LibTorch's
/// allocator back to the device, since a graph has memory of its own. Not
/// thread-safe.
class TESSERA_API CapturedStep {
 public:
  /// Makes one step. Gets the inputs of the call, moved to the model's device
  /// if steps can be captured there.
  using Function =
      std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

  /// `optimizers` are all optimizers that the function steps. The model, the
  /// optimizers and what the function uses must outlive this object. Shard the
  /// model first: modules, parameters and param groups are those of now. Throws
  /// c10::ValueError for options out of range. Not collective.
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

  /// Whether the last call replayed a graph.
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
