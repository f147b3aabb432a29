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

/// Which part of the model an operator works for, told by the storages of its
/// arguments.
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
  /// Null for memory of nobody's.
  const Part* find(const at::Tensor& tensor) const;

 private:
  std::unordered_map<const c10::StorageImpl*, Part> by_storage_;
};

/// [Note: timeline]
///
/// Compute: a callback of LibTorch's RecordFunction sees every operator before
/// it runs, on the thread that trains and on those that run its backward. The
/// first one that reads parameters of another part begins a span. Arguments'
/// storages tell the part, so that it works for sharded and plain models alike,
/// in backward too, where saved parameters are read again. What was a wait is
/// cut out at the end.
///
/// Gather, Reduce and Wait: comm::CallWatch. Operations may end on any thread;
/// those that a background thread starts (a checkpoint being written) belong to
/// no step.
///
/// All of it is under one mutex. On a GPU points in time are events of its
/// streams.
class Timeline {
 public:
  /// Begins. One at a time in a process.
  Timeline(const torch::nn::Module& model, const MemoryCensus& holdings);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  void phase(const std::string& name);
  /// Ends it. Waits for the device.
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

  std::mutex mutex_; // guards all below, until it is finished
  Phase phase_ = Phase::Other;
  Interval current_; // in the Compute lane
  std::vector<Interval> computed_;
  std::map<uint64_t, Interval> calls_; // by id
  std::map<uint64_t, Interval> waits_; // open ones, by the call's id
  std::vector<Interval> waited_;

  std::optional<at::CallbackHandle> callback_;
  std::optional<comm::CallWatch> watch_; // last: it calls the rest
};

} // namespace tessera::train
