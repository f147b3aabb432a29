// Flat tensors in which gradients travel.
#pragma once

#include <tessera/ddp/comm_hook.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "ddp/bucket_packing.h"

namespace tessera::ddp {

struct NamedParam {
  std::string name;
  at::Tensor tensor;
};

/// Which bucket each parameter's gradient lies in, and the memory of the
/// buckets, which is allocated when it is first needed. See [Note: reducer].
class GradientBuckets {
 public:
  struct Slot {
    size_t bucket = 0;
    at::Tensor view; // of its bucket, no view for autograd
    bool is_ready = false;
  };
  struct Bucket {
    std::vector<size_t> params;
    at::Tensor flat;
    size_t num_missing = 0;
    CommFuture reduction; // once it is started
  };

  /// In the reverse order of the parameters. `params` must outlive this.
  GradientBuckets(const std::vector<NamedParam>& params, BucketLimits limits);

  size_t size() const {
    return buckets_.size();
  }
  const std::vector<Bucket>& all() const {
    return buckets_;
  }
  Bucket& operator[](size_t index) {
    return buckets_[index];
  }
  const Bucket& operator[](size_t index) const {
    return buckets_[index];
  }
  /// The place of a parameter's gradient.
  Slot& slot(size_t param) {
    return slots_[param];
  }
  const Slot& slot(size_t param) const {
    return slots_[param];
  }
  /// The bucket of a parameter's gradient.
  Bucket& of(size_t param) {
    return buckets_[slots_[param].bucket];
  }

  /// Allocates the buckets unless they have memory; without data only counts
  /// are kept, as on a single rank.
  void ensure_memory(bool with_data);
  bool has_memory() const {
    return has_memory_;
  }
  /// How often the buckets have got other memory.
  int64_t num_moves() const {
    return num_moves_;
  }
  /// ensure_memory() allocates anew. Collectives in flight keep their memory.
  void drop_memory() {
    has_memory_ = false;
  }

  /// Makes buckets of another order. Gradients that are views of the old
  /// buckets move into the new ones.
  void rearrange(
      const std::vector<size_t>& order,
      bool with_data,
      bool as_views);

  /// Copies a parameter's gradient to its place, zeros if it has none. As a
  /// view, the gradient lives there from now on.
  void fill(size_t param, bool as_view);
  /// Gives the parameters that were used the averages as gradients.
  void write_back(const std::vector<bool>& used, bool as_views);
  /// No gradient has arrived.
  void empty();

 private:
  void arrange(const std::vector<size_t>& order);

  const std::vector<NamedParam>& params_;
  const BucketLimits limits_;
  bool has_memory_ = false;
  int64_t num_moves_ = 0; // of the buckets to other memory
  std::vector<Slot> slots_; // by parameter
  std::vector<Bucket> buckets_;
};

} // namespace tessera::ddp
