#include "engine/cast_shard.h"

#include <ATen/ops/empty.h>

namespace tessera::engine {

const at::Tensor& CastShard::values(int64_t num_writes) {
  if (!kept_.defined()) {
    kept_ = at::empty({shard_.numel()}, options_);
  }
  if (cast_at_ != num_writes) {
    kept_.copy_(shard_);
    cast_at_ = num_writes;
  }
  return kept_;
}

} // namespace tessera::engine
