#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/comm/mesh.h>
#include <tessera/engine/parameters.h>
#include <tessera/fsdp/wrap_policy.h>
#include <tessera/module_ref.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// How a unit's parameters are divided over the ranks.
enum class ShardLayout {
  /// The parameters, one after another, are cut into equal ranges: gathers need
  /// no copy.
  Flat,
  /// Each parameter is cut on dim 0 into chunks of ceil(rows / ranks) rows.
  Dim0,
};

/// Which dtypes a unit computes and reduces in; shards keep the dtype that the
/// parameters had. If an operator would refuse to mix dtypes (a linear of float
/// input and bfloat16 weight), its other floating operands are cast too,
/// differentiably.
struct TESSERA_API MixedPrecisionPolicy {
  /// The dtype of the gathered parameters.
  TORCH_ARG(std::optional<at::ScalarType>, param_dtype) = std::nullopt;
  /// The dtype in which gradients are averaged; default: that of the shards.
  TORCH_ARG(std::optional<at::ScalarType>, reduce_dtype) = std::nullopt;
  /// Keep this rank's shards in param_dtype too, and cast them once for each
  /// step of the optimizer instead of at every gather. Takes memory for a copy
  /// of the shards in param_dtype; on one rank, gathers then need no other
  /// memory. Shards must be written by operators: writes through raw pointers
  /// are not noticed. Cannot be combined with shards in host memory.
  TORCH_ARG(bool, keep_cast_shards) = false;
};

/// Shards, their gradients and so the optimizer's state stay in host memory;
/// parameters are copied to their device when they are gathered.
struct TESSERA_API CPUOffloadPolicy {};

/// Options of fully_shard(), with Python's names and defaults where Python has
/// them.
struct TESSERA_API FullyShardOptions {
  /// The ranks to shard over; default: the world.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
  /// Replaces `group`. With one axis, shards over it. With two axes, the first
  /// one has copies of the model and the second one shards each copy (hybrid
  /// sharding); if the second axis has size 1, nothing is sharded and gradients
  /// are averaged.
  TORCH_ARG(std::optional<Mesh>, mesh) = std::nullopt;
  /// How parameters are cut.
  TORCH_ARG(ShardLayout, layout) = ShardLayout::Flat;
  /// Free the full parameters after the unit's part of forward, and gather them
  /// again in backward. If off, they stay, which takes more memory and saves a
  /// gather.
  TORCH_ARG(bool, reshard_after_forward) = true;
  /// Dtypes to compute and reduce in.
  TORCH_ARG(MixedPrecisionPolicy, mp_policy) = {};
  /// Keep shards in host memory, if a policy is set.
  TORCH_ARG(std::optional<CPUOffloadPolicy>, offload_policy) = std::nullopt;
  /// Memory, in bytes, for hiding the network behind computation: as much for
  /// parameters that are gathered ahead, beside the unit in use and the next
  /// one, and as much for gradients that are still being reduced, beside the
  /// largest. Default: none on the CPU, 192 MiB on a device.
  TORCH_ARG(std::optional<int64_t>, overlap_bytes) = std::nullopt;
  /// Makes submodules units of their own, with the same options, first.
  TORCH_ARG(std::optional<WrapPolicy>, policy) = std::nullopt;
  /// Parameters to leave as they are.
  TORCH_ARG(std::vector<at::Tensor>, ignored_params) = {};
  /// Compare the values that ranks begin with, by digests, when the model is
  /// first used. If off, different values are accepted.
  TORCH_ARG(bool, compare_start) = true;
};

/// Shards the parameters of `module` that are not sharded yet: they become one
/// unit, gathered and freed together. Call it on submodules first (the blocks
/// of a transformer), then on the whole model, or choose the submodules by a
/// policy. The module's type, tree and names stay as they are, and its
/// forward() is called as before: the first operator that reads a parameter
/// gathers the unit.
///
/// Afterwards the module's own parameters are no longer leaves: build
/// optimizers on tessera::parameters(module), clip with
/// tessera::clip_grad_norm_, and write to parameters only through these or
/// inside summon_full_params. Parameters must have the same values on all ranks
/// before the call (tessera::seed() ensures it) or get them by loading state:
/// otherwise the first use of the model throws on all ranks. Deferred
/// parameters (see DeferredInit) get their values here, one parameter at a
/// time. Collective over the group, and so is every use of a parameter: all
/// ranks must make the same calls.
///
/// A parameter tied between units belongs, with a policy, to the unit of the
/// lowest module that contains both; without one, to the first.
///
/// Throws on all ranks, with nothing changed, if the ranks' modules or options
/// differ, or if a parameter is an integer, on the meta device, on another
/// device than the first, or sharded already as part of a larger module. A
/// module without parameters is legal.
TESSERA_API void fully_shard(
    ModuleRef module,
    const FullyShardOptions& options = {});

/// Freezes or thaws a parameter of a module, sharded or not, as
/// Tensor::set_requires_grad does for plain ones, together with its shard,
/// whose gradient is dropped when it is frozen. (Tensor::set_requires_grad on a
/// sharded parameter, or on its shard, does the same at the next gather.) Call
/// it on all ranks alike.
TESSERA_API void set_requires_grad(const at::Tensor& parameter, bool on);

/// Gathers all units of the module, which then stay gathered until reshard() or
/// the end of a backward; reshard() frees them at once. Collective.
TESSERA_API void unshard(ModuleRef module);
TESSERA_API void reshard(ModuleRef module);

/// If off, backward adds to full gradients that stay on this rank; the next
/// backward of the model with synchronisation on averages their sum, also for
/// parameters that it did not use again. recover() drops them. The root stays
/// gathered for the next forward, and so do the units that it begins with, as
/// many as are in use and gathered ahead at other times. For gradient
/// accumulation.
TESSERA_API void set_requires_gradient_sync(ModuleRef module, bool on);

/// Averages the gradients that backwards without synchronisation have left, as
/// the next backward with synchronisation would. Runs no backward, and does not
/// turn synchronisation on. Does nothing if no gradients wait. Collective.
TESSERA_API void reduce_gradients(ModuleRef module);

/// If off, backward averages over the ranks that share a copy of the model and
/// keeps the sums; the next backward with all-reduce on averages them over the
/// copies too. For gradient accumulation in hybrid sharding, where it needs
/// less memory than turning off all synchronisation.
TESSERA_API void set_requires_all_reduce(ModuleRef module, bool on);

/// Turns gradient synchronisation off while the guard lives, then restores it.
/// Guards nest.
class TESSERA_API NoSync {
 public:
  /// For all units of the module. The module must outlive the guard.
  explicit NoSync(ModuleRef module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

/// Scales the gradients of all parameters so that their norm over all ranks is
/// at most `max_norm`; returns the norm they had. This is exactly the norm of
/// the unsharded gradients, whatever the layouts and groups; a single NaN makes
/// all gradients NaN. Parameters of a sharded model that are not sharded
/// themselves must have equal gradients on all ranks: if their norms differ,
/// every rank throws DisagreementError with the name of one, and nothing is
/// scaled. Throws c10::ValueError unless norm_type is positive. Collective.
///
/// The norm is a scalar in double, where the gradients are, as Python's is: on
/// a GPU neither norm nor factor is read by the host, which goes on at once
/// (unless the group has no NCCL and sends through host memory).
/// Only parameters that are not sharded, beside sharded ones on several ranks,
/// have their norms read, to be compared.
TESSERA_API at::Tensor clip_grad_norm_(
    ModuleRef module,
    double max_norm,
    double norm_type = 2.0);

/// Recovers from an exception in forward on some ranks: drops collectives in
/// flight and gradients that wait for synchronisation, and frees all units of
/// the module's group, so that the next step can begin. Call it on every rank.
TESSERA_API void recover(ModuleRef module);

} // namespace tessera
