// What a rank did in a step, and when.
#pragma once

#include <tessera/train/monitor.h>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

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
  /// Null if the memory belongs to no part.
  const Part* find(const at::Tensor& tensor) const;

 private:
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

  static std::unique_ptr<at::ObserverContext> on_operator(
      const at::RecordFunction& function);
  void see_operator(const at::RecordFunction& function);
  void touch(const Parts::Part& part, bool is_first_argument, bool writes);
  void see_call(const comm::CallEvent& event);
  void become(Phase phase, std::string name);
  void stop_watching();
  std::vector<TimelineSpan> resolve() const;

  // Constant after construction.
  const Parts parts_;
  const StepClock clock_;
  const std::thread::id thread_ = std::this_thread::get_id();

  std::mutex mutex_; // guards everything below until the timeline is finished
  Phase phase_ = Phase::Other;
  Interval current_; // in the Compute lane
  std::vector<Interval> computed_;
  std::map<uint64_t, Interval> calls_; // by id
  std::map<uint64_t, Interval> waits_; // open ones, by the call's id
  std::vector<Interval> waited_;

  std::optional<at::CallbackHandle> callback_;
  std::optional<comm::CallWatch> watch_; // last: it uses the other members
};

/// Whether there is a timeline in this process.
bool is_timeline_active();

} // namespace tessera::train
