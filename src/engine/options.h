// What a unit is told when it is made.
#pragma once

#include <tessera/comm/group.h>

#include <c10/core/ScalarType.h>

#include <optional>

#include "engine/layout.h"

namespace tessera::engine {

/// The ranks that train a model, in the roles they play. Fully sharded: `all`
/// and `shard` are one group. Not sharded: `shard` is this rank alone and
/// `replicate` all of them. Hybrid: a grid of both.
struct Groups {
  /// All of them: they agree on options and on the order of collectives.
  Group all;
  /// Ranks that hold the parts of one copy of the parameters.
  Group shard;
  /// Ranks that hold the same part of different copies; no group if there is
  /// one copy only.
  Group replicate = {};
};

struct UnitOptions {
  Layout::Kind layout = Layout::Kind::Flat;
  Layout::Alignment alignment = {};
  /// Where parameters begin, in bytes of the compute dtype; 0: as `alignment`
  /// says.
  int64_t param_alignment_bytes = 0;
  bool reshard_after_forward = true;
  /// dtype of the full parameters; shards keep theirs.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// dtype gradients are reduced in; default: the shard's.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Shards and their gradients lie in host memory.
  bool offload = false;
  /// One leaf, the whole flat shard, in place of one a parameter.
  bool one_leaf = false;
  /// Rank 0's values are taken by all ranks when the unit is made.
  bool sync_from_rank0 = false;
  /// Ranks compare the values they begin with, see [Note: equal starts].
  bool compare_start = true;
};

} // namespace tessera::engine
