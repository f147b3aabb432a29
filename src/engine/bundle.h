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
#include "engine/bundle_gradients.h"
#include "engine/cast_shard.h"
#include "engine/layout.h"
#include "engine/unit_options.h"

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
/// there too. The same goes for a cast shard that is kept, see [Note: cast
/// shards].
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
  /// True if the full buffer borrows the bytes of the shard or of its cast.
  bool shows_shard() const {
    return shows_shard_;
  }

  /// Call it before the shard is written to: waits for a queued copy of the
  /// shard to a device.
  void before_write();

  /// `num_writes` counts the writes to shards of the model until now.
  void start_gather(std::string_view label, int64_t num_writes);
  void finish_gather();
  /// Removes the bytes of the full buffer. `reason` is the error of raw access.
  void free_full(const std::string& reason);

  /// A new full buffer, filled from the `part` of all ranks, which has the
  /// layout of the shard. Collective over the shard group.
  at::Tensor gather_copy(const at::Tensor& part, std::string_view label) const;

  /// What was kept of the shard is wrong, though nobody has written to it.
  void forget_cast() {
    cast_.forget();
  }

  BundleGradients& gradients() {
    return gradients_;
  }
  const BundleGradients& gradients() const {
    return gradients_;
  }

  /// Waits for what is under way, reductions too, and forgets how it ended.
  void settle() noexcept;

  /// Bytes that full parameters occupy now, those on their way and the kept
  /// cast included, beside the shard's.
  size_t full_bytes_now() const;

 private:
  void show_bytes(c10::DataPtr data, size_t bytes);
  void give_bytes(const at::Tensor& source);
  void note_offload_copy();

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

  CastShard cast_;

  struct Gather { // in flight
    at::Tensor into; // (travel_numel)
    Work work;
  };
  Gather gather_;
  std::optional<c10::Event> offload_copied_; // from host memory

  BundleGradients gradients_;
};

} // namespace tessera::engine
