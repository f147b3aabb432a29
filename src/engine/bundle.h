// The parameters of one dtype in a unit: their shard, their full buffer and the
// data sent between them.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/layout.h"
#include "engine/options.h"

namespace tessera::engine {

/// [Note: storage identity]
///
/// Full parameters live in flat buffers, one for each dtype of a unit. The
/// tensors that the module holds become *faces*: views of such a buffer at
/// fixed offsets. The buffer's StorageImpl never changes, only its bytes come
/// and go: resharding removes the bytes, gathering provides others. So whatever
/// points to the storage stays valid: the faces, views of them that a forward
/// made, tensors that autograd saved for backward. Bytes are exchanged without
/// autograd's knowledge, so version counters do not change while the values are
/// the same. A gather fills a buffer of its own, whose bytes are moved over
/// when the gather is complete: nobody sees a partial gather.
///
/// While it has no bytes the storage throws on raw access (LibTorch 2.13 on);
/// operators do not get that far, see [Note: first touch].
///
/// If one rank has a whole copy and computes in the shard's dtype, the full
/// buffer borrows the shard's own bytes: nothing is copied, nothing is held
/// twice. The full buffer is still a storage of its own, so all rules hold
/// there too.
class Bundle {
 public:
  /// `shard` has layout.shard_numel() elements; `device` is where computations
  /// use the full parameters.
  Bundle(
      Layout layout,
      at::Tensor shard,
      at::Device device,
      const Groups& groups,
      const UnitOptions& options,
      BufferPool& pool);

  const Layout& layout() const {
    return layout_;
  }
  const at::Tensor& shard() const {
    return shard_;
  }
  /// (full_numel), a keyless alias of what faces view.
  const at::Tensor& full() const {
    return full_;
  }
  c10::StorageImpl* storage() const {
    return storage_;
  }
  /// True if the full buffer borrows the shard's bytes.
  bool shows_shard() const {
    return shows_shard_;
  }

  /// Call it before the shard is written to: waits for a queued copy of the
  /// shard to a device.
  void before_write();

  void start_gather(std::string_view label);
  void finish_gather();
  /// Removes the bytes of the full buffer. `reason` is the error of raw access.
  void free_full(const std::string& reason);

  /// A new full buffer, filled from the `part` of all ranks, which has the
  /// layout of the shard. Collective over the shard group.
  at::Tensor gather_copy(const at::Tensor& part, std::string_view label) const;

  /// The dtype in which gradients are averaged.
  at::ScalarType reduce_dtype() const;
  /// Adds full gradients, by index in the layout, to those that wait; an
  /// undefined gradient counts as zeros, since a peer may have one.
  void add_gradients(
      const std::vector<at::Tensor>& gradients,
      const std::vector<bool>& trainable);
  /// Whether gradients wait for a reduction or, with `all_reduce`, for the
  /// all-reduce that an earlier reduction left out.
  bool has_waiting(bool all_reduce) const {
    return gradients_.defined() || (all_reduce && partial_.defined());
  }
  /// Averages the gradients that wait. Without `all_reduce` only over the shard
  /// group; the result then waits for the next reduction with `all_reduce`.
  void start_reduction(bool all_reduce, std::string_view label);
  bool is_reducing() const {
    return reduced_.defined();
  }
  /// The average as (shard_numel) in the shard's dtype and on its device;
  /// undefined if it waits for an all-reduce. `used` says by index which
  /// parameters had a gradient.
  struct Reduced {
    at::Tensor mean;
    std::vector<bool> used;
  };
  Reduced finish_reduction(std::string_view label);
  void drop_reduction() noexcept;

  /// Waits for collectives in flight, and ignores their results and errors.
  void settle() noexcept;

  /// Bytes that full parameters occupy now in addition to the shard, including
  /// those being gathered; and the bytes of gradients that wait or are being
  /// reduced.
  size_t full_bytes_now() const;
  size_t gradient_bytes_now() const;

 private:
  void show_bytes(c10::DataPtr data, size_t bytes);
  void give_bytes();
  void unpack(const at::Tensor& full, const at::Tensor& gathered) const;
  at::Tensor gradient_slot(const at::Tensor& buffer, size_t index) const;

  // Constant after construction.
  const Layout layout_;
  const Groups groups_;
  const UnitOptions options_;
  BufferPool& pool_;
  const at::Device device_;
  const at::Tensor shard_;
  at::Tensor full_;
  c10::StorageImpl* storage_ = nullptr;
  bool shows_shard_ = false;

  // A gather in flight.
  std::optional<c10::Event> offload_copied_; // from host memory
  at::Tensor gathered_; // (ranks, shard_numel)
  Work gather_;

  // Gradients that wait, or are being reduced.
  at::Tensor gradients_; // (ranks, shard_numel) in the reduce dtype
  at::Tensor reduced_; // (shard_numel)
  at::Tensor partial_; // (shard_numel): reduced, but not over the copies
  std::vector<bool> used_; // by index: got a gradient
  bool all_reduces_ = true;
  Work reduction_;
};

} // namespace tessera::engine
