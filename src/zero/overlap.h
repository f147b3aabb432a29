// Steps ZeRO inside the backward of a data-parallel model.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/ddp/comm_hook.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <vector>

namespace tessera {

/// [Note: overlap]
///
/// A communication hook sees buckets of gradients in the same order on every
/// rank. The hook lets the hook that it wraps reduce them, and steps their
/// parameters later, in the same order:
///
///   reduce 0 | reduce 1 | step 0, send 0 | reduce 2 | step 1, send 1 | ...
///
/// Bucket i is stepped when bucket i + 1 has been given to the network, so its
/// own reduction overlaps with backward up to that point, and its new values
/// are sent while backward continues. The order of starts depends only on the
/// order of buckets, never on what has already arrived: all ranks start the
/// same collectives in the same order. If not interleaved, all buckets are
/// stepped at the end of backward, each while the one before is being sent. At
/// the end of backward everything has arrived, because nothing announces the
/// next forward.
///
/// A parameter may be changed as soon as its gradient exists: whatever needed
/// its value in backward has run. Any other use of the old value finds its
/// version changed, which autograd refuses.
class ZeroRedundancyOptimizer::Overlap {
 public:
  enum class Phase {
    /// Buckets are not final or have not been seen yet. Nothing is stepped.
    Waiting,
    /// One backward has shown all buckets; the next one begins with the set-up.
    Seen,
    /// The local optimizer exists, and every backward steps.
    Ready,
  };

  explicit Overlap(ZeroRedundancyOptimizer& zero) : zero_(&zero) {}

  /// The arguments of hook_with_zero_step().
  struct Wiring {
    CommHook hook;
    const detail::DDPHandle* ddp = nullptr;
    bool shard_buckets = false;
    bool is_interleaved = false;
  };
  static CommHook make_hook(ZeroRedundancyOptimizer& zero, Wiring wiring);
  /// The optimizer has been destroyed.
  void disconnect() {
    zero_ = nullptr;
  }
  bool is_ready() const {
    return phase_ == Phase::Ready;
  }

 private:
  /// The part of a bucket that one rank steps.
  struct Part {
    int rank;
    size_t begin; // parameters of the bucket
    std::vector<at::Tensor> params;
    at::Tensor flat; // their memory
  };
  struct Bucket {
    std::vector<at::Tensor> params;
    std::vector<Part> parts;
  };
  /// A bucket during a backward.
  struct InFlight {
    CommFuture reduction;
    GradBucket bucket;
    at::Tensor result;
  };

  static CommFuture on_bucket(
      const std::shared_ptr<Overlap>& overlap,
      GradBucket& bucket);
  void connect(Wiring wiring);
  void begin_backward();
  void record(const GradBucket& bucket);
  void set_up();
  void check_params() const;
  void divide_buckets();
  static void move_into_flat(Part& part);
  void step_through(size_t num_buckets);
  void step(Part& part, const InFlight& bucket);
  void check_trainable(const Part& part) const;
  at::Tensor finish(size_t bucket);
  void finish_sends();

  ZeroRedundancyOptimizer* zero_;
  Wiring wiring_;
  Group group_;
  Phase phase_ = Phase::Waiting;
  std::vector<Bucket> buckets_;

  // State of the current backward.
  std::vector<InFlight> in_flight_;
  size_t num_stepped_ = 0;
  std::vector<Work> sends_;
  std::exception_ptr error_;
};

} // namespace tessera
