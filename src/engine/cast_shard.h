// A shard in the dtype that is computed in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace tessera::engine {

/// [Note: cast shards]
///
/// Under mixed precision a gather casts this rank's shard first: twice in each
/// step, and twice for each micro-batch of an accumulation, though the shard
/// changes once in a step. With UnitOptions::keep_cast_shards the cast values
/// are kept in memory of their own and are cast again only when the model was
/// written to, which the units count (UnitIdentity::num_writes()). Writes that
/// nobody announces ([Note: raw access]), through a pointer of the program's,
/// are not counted, so this is off by default: without it, the next gather sees
/// them.
///
/// Where one rank has a whole copy, nothing is left for a gather to do: the
/// full buffer borrows the bytes of the cast shard, as it borrows those of the
/// shard itself where nothing is cast.
class CastShard {
 public:
  /// Keeps nothing unless `is_kept`. `options` are those of full parameters.
  CastShard(
      const at::Tensor& shard,
      const at::TensorOptions& options,
      bool is_kept)
      : shard_(shard), options_(options), is_kept_(is_kept) {}

  bool is_kept() const {
    return is_kept_;
  }
  /// The shard's values, cast anew if `num_writes`, the number of writes to the
  /// model, has changed. Only if is_kept().
  const at::Tensor& values(int64_t num_writes);
  /// The next values() casts again, into the same memory.
  void forget() {
    cast_at_ = kNever;
  }
  size_t bytes_now() const {
    return kept_.defined() ? kept_.nbytes() : 0;
  }

 private:
  static constexpr int64_t kNever = -1;

  // Constant after construction.
  const at::Tensor shard_;
  const at::TensorOptions options_;
  const bool is_kept_;

  at::Tensor kept_; // undefined until the first values()
  int64_t cast_at_ = kNever; // num_writes then
};

} // namespace tessera::engine
