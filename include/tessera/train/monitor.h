#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <torch/arg.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

/// Bytes of tensors on this rank when memory peaked in a step, on the device
/// that the model computes on.
struct TESSERA_API MemoryByKind {
  /// What this rank keeps of the parameters: shards, or whole parameters if
  /// nothing is sharded.
  int64_t shards = 0;
  /// Gathered parameters, and buffers kept for the next gathers.
  int64_t full = 0;
  /// Gradients: those that optimizers see, and those in flight (full gradients
  /// that wait or are being reduced, buckets).
  int64_t gradients = 0;
  /// State of the optimizers, as it was when the step began.
  int64_t optimizer = 0;
  /// What the step allocated beyond all of these: saved for backward, or being
  /// computed.
  int64_t activations = 0;
  /// The module's buffers, and other memory from before the step began (such as
  /// the data). On the CPU, only what was allocated since the monitor was made.
  int64_t other = 0;

  /// The sum of all kinds.
  int64_t total() const {
    return shards + full + gradients + optimizer + activations + other;
  }
};

/// A row of a timeline.
enum class TimelineLane {
  /// The thread (on a GPU: the stream) that runs the model, while it runs:
  /// "blocks.3 forward", "blocks.3 backward", "optimizer".
  Compute,
  /// Parameters being gathered, from the start of the operation to its end:
  /// "blocks.3".
  Gather,
  /// Gradients being averaged, likewise.
  Reduce,
  /// The time for which Compute had to wait for a gather or a reduction. (Over
  /// shared memory the waiting thread also copies.)
  Wait,
};
/// "compute", "gather", "reduce", "wait".
TESSERA_API const char* lane_name(TimelineLane lane);

/// A stretch of a step in one lane.
struct TESSERA_API TimelineSpan {
  /// The row of the span.
  TimelineLane lane = TimelineLane::Compute;
  /// What was done, or for which unit.
  std::string name;
  /// Seconds since the step began.
  double start = 0;
  double end = 0;
};

/// A part of the model that is gathered as one.
struct TESSERA_API UnitInfo {
  std::string name; // as in errors; the model itself has its class's
  int64_t parameters = 0; // elements, without padding
  int64_t full_bytes = 0; // gathered, as it is computed with
  int64_t shard_bytes = 0; // on this rank
};

/// What to watch in a step beyond time and memory.
struct TESSERA_API MonitorOptions {
  /// Collect spans. Costs several percent of a step, and waits for a GPU at
  /// both ends of the step. A CapturedStep is eager meanwhile.
  TORCH_ARG(bool, timeline) = false;
};

/// The time and memory of a step.
struct TESSERA_API StepReport {
  /// From begin_step() to end_step(). Work that a GPU has not finished by then
  /// is not included, unless something waited for it, as reading the loss does.
  double seconds = 0;
  MemoryByKind memory;
  /// Sorted by start; empty unless requested.
  std::vector<TimelineSpan> spans;
};

/// Watches training steps of one model on this rank, sharded, data-parallel or
/// plain.
///
///   StepMonitor monitor(model, {optimizer});
///   monitor.begin_step(MonitorOptions().timeline(step == 10));
///   ... forward, backward, optimizer.step() ...
///   StepReport report = monitor.end_step();
///
/// No function is collective, and the monitor does not change the step. Without
/// a timeline it costs well under one percent of a step (docs/monitor.md).
///
/// Compute spans have names of units; where there are none, names of the root's
/// children and of the elements of lists and sequences among these. Two
/// children that share memory count as the first. The time after a backward and
/// before the next forward is "optimizer" if the model's parameters were
/// written in it. Kernels that are not LibTorch operators belong to the
/// operator before.
///
/// On a CPU memory is counted by an allocator around LibTorch's own, for all of
/// the process, from the first monitor on; blocks count with the size that they
/// really have. On a GPU LibTorch's counters are used; their peak is reset at
/// each step, and where nothing is sharded the shares of the kinds are those of
/// the start of backward or of the end of the step, whichever had more.
///
/// Thread safety: the thread that trains makes all calls. Only one monitor per
/// process may be inside a step at a time.
class TESSERA_API StepMonitor {
 public:
  /// Both must outlive the monitor, which knows the units that exist now: shard
  /// the model first.
  explicit StepMonitor(ModuleRef model, OptimizerRefs optimizers = {});
  /// Forgets a step that has begun.
  ~StepMonitor();
  StepMonitor(const StepMonitor&) = delete;
  StepMonitor& operator=(const StepMonitor&) = delete;

  /// Begins a step, also after one that an exception ended. Throws c10::Error
  /// if another monitor of the process is inside a step.
  void begin_step(const MonitorOptions& options = {});
  /// Names what follows in the Compute lane ("data", "clipping"), until the
  /// next phase, forward or backward. May be left out. Does nothing outside a
  /// step with a timeline.
  void phase(const std::string& name);
  /// Throws c10::Error if no step has begun.
  StepReport end_step();

  /// Units in the order of their modules; none if nothing is sharded.
  std::vector<UnitInfo> units() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
