// The options of a unit.
#pragma once

#include <tessera/comm/group.h>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "engine/layout.h"

namespace tessera::engine {

/// The ranks that train a model, in the roles they play. Fully sharded: `all`
/// and `shard` are one group. Not sharded: `shard` is this rank alone and
/// `replicate` all of them. Hybrid: a grid of both.
struct Groups {
  /// All ranks: they agree on options and on the order of collectives.
  Group all;
  /// Ranks that hold the parts of one copy of the parameters.
  Group shard;
  /// Ranks that hold the same part of different copies; an invalid group if
  /// there is only one copy.
  Group replicate = {};
};

struct UnitOptions {
  Layout::Kind layout = Layout::Kind::Flat;
  Layout::Alignment alignment = {};
  /// Alignment of parameters in bytes of the compute dtype; 0 to use
  /// `alignment`.
  int64_t param_alignment_bytes = 0;
  bool reshard_after_forward = true;
  /// The dtype of the full parameters; shards keep their own.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// The dtype in which gradients are reduced; the shard's by default.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Keep shards in param_dtype too, see [Note: cast shards].
  bool keep_cast_shards = false;
  /// See default_overlap_bytes() in gather_order.h.
  std::optional<int64_t> overlap_bytes = std::nullopt;
  /// Shards and their gradients lie in host memory.
  bool offload = false;
  /// One leaf, the whole flat shard, instead of one leaf per parameter.
  bool one_leaf = false;
  /// All ranks take rank 0's values when the unit is made.
  bool sync_from_rank0 = false;
  /// Ranks compare their initial values, see [Note: equal starts].
  bool compare_start = true;
};

} // namespace tessera::engine
