// Averages gradients over the ranks while backward runs.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/ddp/comm_hook.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ddp/backward_agreement.h"
#include "ddp/bucket_packing.h"
#include "ddp/gradient_buckets.h"
#include "engine/plain_params.h"
#include "libtorch/backward_hooks.h"
#include "libtorch/recording.h"

namespace tessera::ddp {

/// Thrown by a hook's result in place of `error` if every rank throws in the
/// same bucket: no rank waits for a collective of another, so the group remains
/// usable.
struct ThrownOnAllRanks {
  std::exception_ptr error;
};

struct ReducerOptions {
  BucketLimits limits;
  bool gradient_as_bucket_view = false;
  /// Parameters may remain without a gradient.
  bool tolerates_unused = false;
  /// How many reductions pass before buckets are rebuilt in the order of
  /// gradients. PyTorch takes one more with a static graph, and hooks rely on
  /// the number.
  int rebuilds_after = 1;
};

/// [Note: reducer]
///
/// Parameters lie in buckets; a bucket is a flat tensor that their gradients
/// are copied into as they arrive (or live in, with gradient_as_bucket_view).
/// Once a bucket has all its gradients and all buckets before it have started,
/// its reduction starts and overlaps with the rest of backward. So all ranks
/// start the same reductions in the same order, whatever the order of their
/// gradients.
///
/// A hook on each parameter's gradient accumulator reports that a gradient has
/// arrived. A callback of autograd's engine reports that backward has ended:
/// gradients that have not arrived by then never will. Their places in the
/// bucket are filled with the gradients of earlier backwards, or zeros, so that
/// no other rank waits in vain; then the ranks exchange how many parameters
/// were missing. Usually none; otherwise it is an error on every rank or, if
/// missing gradients are tolerated, the ranks exchange which ones. A parameter
/// that no rank used keeps the gradient it had; a parameter that any rank used
/// gets the average on all ranks.
///
/// In the same exchange the ranks report how many forwards they made through
/// the handle, and how many steps their optimizers made, since the last
/// reduction. A rank whose backward reached no parameter has made more of both
/// than the others, and all ranks throw; see [Note: steps of ranks].
///
/// c10d's own Reducer is not used: it must see a model's outputs before
/// backward to know which parameters are unused, which a plain call of
/// forward() does not reveal, and its hooks take Python's futures.
///
/// Buckets are made in the reverse order of the parameters at first, and after
/// the first backward (or the second, see ReducerOptions) in the order in which
/// gradients arrived on rank 0.
class Reducer {
 public:
  /// `on_begin` is called at the first gradient of a backward that reduces;
  /// `find_unknown` at its end, for the names of the model's trainable
  /// parameters that are not reduced.
  Reducer(
      Group group,
      std::vector<NamedParam> params,
      ReducerOptions options,
      std::function<void()> on_begin,
      std::function<std::vector<std::string>()> find_unknown);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// All reducers of this process, for reports about a model.
  static std::vector<Reducer*> all();
  bool reduces(const at::Tensor& param) const;
  const Group& group() const {
    return group_;
  }
  /// Its part of a step that is captured.
  libtorch::HostPart host_part();
  /// Whether the tensor lies in a bucket.
  bool holds(const at::Tensor& tensor) const;
  /// Calls `see(flat)` for each bucket that has memory. Call it on the thread
  /// that runs backward, or between backwards.
  template <class See>
  void for_each_bucket(const See& see) const {
    for (const auto& bucket : buckets_.all()) {
      if (bucket.flat.defined()) {
        see(bucket.flat);
      }
    }
  }

  /// If off, gradients accumulate on each rank. Takes effect when a backward
  /// begins.
  void set_sync(bool on) {
    syncs_ = on;
    averaged_.set_counting(on); // see [Note: steps of ranks]
  }
  bool syncs() const {
    return syncs_;
  }
  /// Sets a hook that replaces the average. `control` has the same ranks as the
  /// group: the ranks use it to report a hook that threw, while the group still
  /// waits for the collectives that the hook should have started.
  void set_hook(CommHook hook, Group control) {
    hook_ = std::move(hook);
    control_ = std::move(control);
    buckets_.drop_memory();
  }
  /// A forward whose gradients are to be reduced has begun.
  void note_forward() {
    ++num_forwards_;
  }
  /// Ranks may have made different numbers of steps: the count begins again.
  void forget_steps() {
    averaged_.restart_count();
  }
  bool has_hook() const {
    return hook_ != nullptr;
  }
  bool has_rebuilt() const {
    return has_rebuilt_;
  }

  /// Makes the collectives of a backward without running one, with zeros as
  /// gradients. This rank's gradients stay as they are, unless they live in the
  /// buckets.
  void shadow();

  /// Makes the collectives of a backward without running one, with the
  /// gradients that accumulated without synchronisation; a rank that has none
  /// sends zeros. All ranks get the averages.
  void reduce_accumulated();

  size_t num_buckets() const {
    return buckets_.size();
  }

 private:
  void on_gradient(size_t param);
  void begin();
  void end();
  void reduce_rest();
  void reset();
  void become_idle();

  bool moves_data() const;
  void fill(size_t param);
  void start_ready_buckets();
  void start(size_t bucket);
  void settle(int64_t num_missing);
  BackwardReport report(int64_t num_missing) const;
  std::vector<at::Tensor> wait_for_buckets();
  void check_result(size_t bucket, const at::Tensor& result) const;
  std::function<void()> effect_of_replays();
  [[noreturn]] void refuse_result(size_t bucket, const std::string& what) const;
  std::vector<std::string> missing_names() const;
  void rebuild_buckets();

  const Group group_;
  const std::vector<NamedParam> params_;
  const ReducerOptions options_;
  const std::function<void()> on_begin_;
  const std::function<std::vector<std::string>()> find_unknown_;
  engine::AveragedParams averaged_;
  CommHook hook_;
  Group control_; // set if there is a hook
  bool syncs_ = true;

  std::mutex mutex_; // the engine has a thread for each device
  bool is_reducing_ = false; // from the first gradient to the end of backward
  bool is_shadow_ = false;
  int64_t num_reductions_ = 0; // that were not recorded
  bool has_rebuilt_ = false;
  GradientBuckets buckets_;
  std::vector<bool> was_used_; // since the last reduction, by parameter
  size_t num_started_ = 0;
  int64_t num_forwards_ = 0; // since the last reduction
  std::exception_ptr failure_; // of a hook, in this backward
  std::vector<size_t> ready_order_;
  const std::shared_ptr<char> life_ = std::make_shared<char>();
  std::vector<libtorch::GradientHook>
      hooks_; // last: they use the other members
};

} // namespace tessera::ddp
