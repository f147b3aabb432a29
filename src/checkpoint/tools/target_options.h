// How `tessera ckpt convert` writes, whatever the format.
#pragma once

#include <cstdint>

namespace tessera::checkpoint {

struct TargetOptions {
  bool overwrite = false;
  /// safetensors in a folder: a file has no more than this, unless it has a
  /// single tensor.
  uint64_t max_shard_bytes = 5'000'000'000;
  bool drop_values =
      false; // safetensors: leave out values that are not tensors
};

} // namespace tessera::checkpoint
