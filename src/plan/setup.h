// How a model is trained: over which ranks, in which dtypes, with which
// optimizer.
#pragma once

#include <cstdint>
#include <optional>

#include "checkpoint/format/dtype.h"
#include "engine/layout.h"
#include "plan/clock.h"
#include "plan/model.h"

namespace tessera::plan {

constexpr int64_t kMostRanks = 1 << 24;

enum class Engine {
  Sharded, // fully_shard, FSDP
  Ddp, // DistributedDataParallel
  Zero, // the same with a ZeroRedundancyOptimizer
};

enum class Optimizer { AdamW, Sgd, SgdMomentum, Adagrad, RmsProp, None };

/// For example "adamw" or "sgd-momentum".
const char* name_of(Optimizer optimizer);

enum class Device { Cpu, Cuda };

struct TrainingSetup {
  Engine engine = Engine::Sharded;
  /// Copies of the model, and ranks that share one. Ddp and Zero: shards is 1.
  int64_t copies = 1;
  int64_t shards = 1;
  /// NoShard: more ranks are more copies, not more shards.
  bool is_whole = false;
  bool reshard_after_forward = true;
  engine::Layout::Kind layout = engine::Layout::Kind::Flat;
  /// The dtype of the shards; default: the model's own.
  std::optional<format::DType> dtype = std::nullopt;
  /// The dtype of full parameters and activations; default: the shards' dtype.
  std::optional<format::DType> param_dtype = std::nullopt;
  /// The dtype in which gradients are reduced; default: the shards' dtype.
  std::optional<format::DType> reduce_dtype = std::nullopt;
  /// Shards are kept in param_dtype too.
  bool keep_cast_shards = false;
  /// Memory for overlap; default: the engine's on this device.
  std::optional<int64_t> overlap_bytes = std::nullopt;
  Optimizer optimizer = Optimizer::AdamW;
  /// Forwards and backwards for each step of the optimizer, and whether all of
  /// these backwards reduce, or the last one only.
  int64_t accumulate = 1;
  bool syncs_always = true;
  /// Shards, their gradients and optimizer state lie in host memory.
  bool offload = false;
  Device device = Device::Cuda;
  Speeds speeds = {};

  int64_t world() const {
    return copies * shards;
  }
  format::DType shard_dtype(const Param& param) const {
    return dtype.value_or(param.dtype);
  }
};

/// True for dtypes that can have gradients and are cast in mixed precision.
bool is_floating(format::DType dtype);

/// Throws PlanError for what the engine does not support, and for absurd
/// numbers.
void check(const TrainingSetup& setup);

/// How many tensors of the parameters' size an optimizer keeps.
int64_t states_of(Optimizer optimizer);
/// How many tensors of the parameters' size a step allocates and frees.
int64_t temporaries_of(Optimizer optimizer, Device device);
/// True for optimizers that count steps, in a float32 per parameter.
bool counts_steps(Optimizer optimizer);
inline constexpr int64_t kStepBytes = 4;

} // namespace tessera::plan
