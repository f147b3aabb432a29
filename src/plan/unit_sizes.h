// The memory of a unit on a rank, in each of its states.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/model.h"
#include "plan/setup.h"

namespace tessera::plan {

/// Parameters of one dtype in a unit, like an engine::Bundle; in bytes.
struct BundleSizes {
  int64_t shard = 0;
  int64_t cast = 0; // the shard in the compute dtype, where that is kept
  int64_t gathered = 0; // the buffer that a gather fills, in the compute dtype
  int64_t full = 0; // what faces view; the same memory, unless it copies out
  int64_t gradients = 0; // what a reduction starts from, in the reduce dtype
  int64_t reduced = 0; // this rank's part of the reduced gradients
  int64_t shard_gradient = 0; // the same in the shard's dtype
  int64_t own = 0; // the shard without padding, on the rank that has most
  int64_t num_own = 0; // parameters that this rank has elements of
  /// Full parameters are the shard itself, or its kept cast: one rank, no
  /// offload.
  bool shows_shard = false;
  /// A reduced gradient is copied to become the shard's.
  bool converts_gradient = false;
  /// A gather ends with a copy from `gathered` to `full`.
  bool copies_out = false;
  /// Parameters and gradients travel whole, as sums over the ranks.
  bool travels_whole = false;
};

struct UnitSizes {
  std::vector<BundleSizes> bundles;
  /// The size of each parameter's gradient as backward computes it.
  std::vector<int64_t> full_gradients;

  int64_t shard() const;
  int64_t full() const; // 0 where it shows the shard
  int64_t gradients() const; // full ones, as they are reduced
  int64_t own() const;
};

/// Throws TooLarge.
UnitSizes sizes_of(const UnitKind& kind, const TrainingSetup& setup);
/// By kind of the model.
std::vector<UnitSizes> sizes_of(const Model& model, const TrainingSetup& setup);

} // namespace tessera::plan
