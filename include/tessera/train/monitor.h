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

/// Bytes of tensors on this rank at the moment of a step when they were most,
/// on the device that the model computes on.
struct TESSERA_API MemoryByKind {
  /// What this rank keeps of the parameters: shards, or whole ones where
  /// nothing is sharded.
  int64_t shards = 0;
  /// Gathered parameters, and buffers kept for the next ones to be gathered.
  int64_t full = 0;
  /// Gradients: those that optimizers see, and those on their way there (full
  /// ones that wait or are being reduced, buckets).
  int64_t gradients = 0;
  /// State of the optimizers, as it was when the step began.
  int64_t optimizer = 0;
  /// What the step allocated beyond all of these: saved for backward, or being
  /// computed.
  int64_t activations = 0;
  /// The module's buffers, and what was there before the step began and is none
  /// of these (the data, say). On the CPU: as far as it was allocated since the
  /// monitor was made.
  int64_t other = 0;

  /// All of them.
  int64_t total() const {
    return shards + full + gradients + optimizer + activations + other;
  }
};

/// A row of a timeline.
enum class TimelineLane {
  /// The thread (on a GPU: the stream) that runs the model, while it runs:
  /// "blocks.3 forward", "blocks.3 backward", "optimizer".
  Compute,
  /// Parameters on their way to this rank, from the start of the operation to
  /// its end: "blocks.3".
  Gather,
  /// Gradients being averaged, likewise.
  Reduce,
  /// The time for which Compute had to wait for one of these. (Over shared
  /// memory the one who waits also copies.)
  Wait,
};
/// "compute", "gather", "reduce", "wait".
TESSERA_API const char* lane_name(TimelineLane lane);

/// A stretch of a step in one lane.
struct TESSERA_API TimelineSpan {
  /// In which row it is.
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
  /// Collect spans. Costs several percent of a step; a GPU is waited for at
  /// both ends of it.
  TORCH_ARG(bool, timeline) = false;
};

/// What a step took.
struct TESSERA_API StepReport {
  /// From begin_step() to end_step(). Work that a GPU has not finished by then
  /// is not in it, unless something waited: reading the loss does.
  double seconds = 0;
  MemoryByKind memory;
  /// By start; empty unless asked for.
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
/// Nothing here is collective, and nothing about the step changes. Without a
/// timeline it costs well under one percent of a step (docs/monitor.md).
///
/// Compute spans have names of units; where there are none, names of the root's
/// children and of the elements of lists and sequences among these. Two
/// children that share memory count as the first. What comes after a backward
/// and before the next forward is "optimizer", if the model's parameters were
/// written in it. Kernels that are not LibTorch operators belong to the
/// operator before.
///
/// On a CPU memory is counted by an allocator around LibTorch's own, for all of
/// the process, from the first monitor on; blocks count with the size that they
/// really have. On a GPU LibTorch's counters serve; their peak is reset at each
/// step, and where nothing is sharded the shares of the kinds are those of the
/// start of backward or of the end of the step, whichever had more.
///
/// Thread safety: the thread that trains makes all calls. Of the monitors of
/// one process one at a time is inside a step.
class TESSERA_API StepMonitor {
 public:
  /// Both must outlive it. Units are those of now: shard the model first.
  explicit StepMonitor(ModuleRef model, OptimizerRefs optimizers = {});
  /// A step that has begun is forgotten.
  ~StepMonitor();
  StepMonitor(const StepMonitor&) = delete;
  StepMonitor& operator=(const StepMonitor&) = delete;

  /// Begins a step, also after one that was left by an exception. Throws
  /// c10::Error if another monitor of the process is inside a step.
  void begin_step(const MonitorOptions& options = {});
  /// Names what follows in the Compute lane ("data", "clipping"), until the
  /// next phase, forward or backward. May be left out. Does nothing outside of
  /// a step with a timeline.
  void phase(const std::string& name);
  /// Throws c10::Error if no step has begun.
  StepReport end_step();

  /// Units in the order of their modules; none where nothing is sharded.
  std::vector<UnitInfo> units() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
