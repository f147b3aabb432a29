// What a rank did in a step, and when.
#pragma once

#include <tessera/train/monitor.h>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "comm/diagnostics/observer.h"
#include "train/memory_census.h"
#include "train/moment.h"

namespace tessera::train {

/// Finds the part of the model that an operator works for by the storages of
/// its arguments.
class Parts {
 public:
  Parts(const torch::nn::Module& model, const MemoryCensus& holdings);

  enum class Role {
    Full, // full parameters of a unit
    Shard, // what the optimizer writes
    Plain, // both
  };
  struct Part {
    Role role;
    std::string name;
  };
  /// Of an operator's argument, a tensor or a list: the parts that its memory
  /// belongs to, in order.
  std::vector<const Part*> among(const c10::IValue& argument) const;

 private:
  /// Null if the memory belongs to no part.
  const Part* find(const at::Tensor& tensor) const;

  std::unordered_map<const c10::StorageImpl*, Part> by_storage_;
};

/// [Note: timeline]
///
/// Compute: a callback of LibTorch's RecordFunction sees every operator before
/// it runs, on the thread that trains and on those that run its backward. The
/// first one that reads parameters of another part begins a span. The part is
/// found by the storages of the arguments, which works for sharded and plain
/// models alike, and also in backward, where saved parameters are read again.
/// Waits are cut out at the end.
///
/// Gather, Reduce and Wait: comm::CallWatch. Operations may end on any thread;
/// those that a background thread starts (such as writing a checkpoint) do not
/// belong to a step.
///
/// One mutex guards all of this. On a GPU, points in time are events of its
/// streams.
class Timeline {
 public:
  /// Begins a timeline. Only one at a time per process.
  Timeline(const torch::nn::Module& model, const MemoryCensus& holdings);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  void phase(const std::string& name);
  /// Ends the timeline. Waits for the device.
  std::vector<TimelineSpan> finish();

 private:
  enum class Phase { Other, Named, Forward, Backward, Optimizer };
  struct Interval {
    TimelineLane lane = TimelineLane::Compute;
    std::string name;
    Moment start;
    std::optional<Moment> end;
  };

  Mutex mutex_;

  static std::unique_ptr<at::ObserverContext> on_operator(
      const at::RecordFunction& function);
  void see_operator(const at::RecordFunction& function);
  void touch(const Parts::Part& part, bool is_first_argument, bool writes)
      TESSERA_REQUIRES(mutex_);
  void see_call(const comm::CallEvent& event);
  void become(Phase phase, std::string name) TESSERA_REQUIRES(mutex_);
  void stop_watching();
  std::vector<TimelineSpan> resolve() const TESSERA_REQUIRES(mutex_);

  // Constant after construction.
  const Parts parts_;
  const StepClock clock_;
  const std::thread::id thread_ = std::this_thread::get_id();

  Phase phase_ TESSERA_GUARDED_BY(mutex_) = Phase::Other;
  // In the Compute lane.
  Interval current_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Interval> computed_ TESSERA_GUARDED_BY(mutex_);
  // By the call's id; of the waits those that are open.
  std::map<uint64_t, Interval> calls_ TESSERA_GUARDED_BY(mutex_);
  std::map<uint64_t, Interval> waits_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Interval> waited_ TESSERA_GUARDED_BY(mutex_);

  // Of the thread that made the timeline.
  std::optional<at::CallbackHandle> callback_;
  std::optional<comm::CallWatch> watch_; // last: it uses the other members
};

/// Whether there is a timeline in this process.
bool is_timeline_active();

} // namespace tessera::train
