#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// How a unit's parameters are cut over the ranks.
enum class ShardLayout {
  /// One after another, then into equal ranges: gathers without a copy.
  Flat,
  /// Each parameter on dim 0, in chunks of ceil(rows / ranks) rows.
  Dim0,
};

/// Which dtypes a unit computes and reduces in; shards keep the dtype that the
/// parameters had.
struct TESSERA_API MixedPrecisionPolicy {
  /// Of the gathered parameters.
  TORCH_ARG(std::optional<at::ScalarType>, param_dtype) = std::nullopt;
  /// In which gradients are averaged; default: the shards'.
  TORCH_ARG(std::optional<at::ScalarType>, reduce_dtype) = std::nullopt;
};

struct TESSERA_API FullyShardOptions {
  /// The ranks to shard over; default: the world.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
  TORCH_ARG(ShardLayout, layout) = ShardLayout::Flat;
  /// Free the full parameters after the unit's part of forward, and gather them
  /// again in backward. Off: they stay, more memory and one gather less.
  TORCH_ARG(bool, reshard_after_forward) = true;
  TORCH_ARG(MixedPrecisionPolicy, mp_policy) = {};
  /// Parameters to leave as they are.
  TORCH_ARG(std::vector<at::Tensor>, ignored_params) = {};
};

/// Shards the parameters of `module` that are not sharded yet: they become one
/// unit, gathered and freed together. Call it on submodules first (the blocks
/// of a transformer), then on the whole. The module's type, tree and names stay
/// as they are, and its forward() is called as before: the first operator that
/// reads a parameter gathers the unit.
///
/// Afterwards the module's own parameters are no leaves: build optimizers on
/// tessera::parameters(module), clip with tessera::clip_grad_norm_, and write
/// to parameters only through these. Parameters must have the same values on
/// all ranks before. Collective over the group, and so is every use of a
/// parameter: all ranks must make the same calls.
///
/// Throws on all ranks, with nothing changed, if the ranks' modules or options
/// differ, or if a parameter is an integer, on the meta device or sharded by
/// this very call's module already. A module without parameters is legal.
TESSERA_API void fully_shard(
    torch::nn::Module& module,
    const FullyShardOptions& options = {});

/// What an optimizer gets: for each parameter of the module, in its order and
/// once even if it is tied, this rank's shard, or the parameter itself if it is
/// not sharded. Frozen and empty ones are included, so that all ranks get
/// equally many. The same tensors at every call.
TESSERA_API std::vector<at::Tensor> parameters(torch::nn::Module& module);
/// The same with the module's names.
TESSERA_API std::vector<std::pair<std::string, at::Tensor>> named_parameters(
    torch::nn::Module& module);

/// Gathers all units of the module, or frees them, now. Collective.
TESSERA_API void unshard(torch::nn::Module& module);
TESSERA_API void reshard(torch::nn::Module& module);

/// Off: backward adds to full gradients that stay on this rank; the next
/// backward with it on averages their sum. For gradient accumulation.
TESSERA_API void set_requires_gradient_sync(torch::nn::Module& module, bool on);

/// Scales the gradients of all parameters so that their norm over all ranks is
/// at most `max_norm`; returns the norm they had. Exactly the norm of the
/// unsharded gradients, whatever the layouts and groups. Collective.
TESSERA_API double clip_grad_norm_(
    torch::nn::Module& module,
    double max_norm,
    double norm_type = 2.0);

/// After an exception on some ranks in forward: drops what is in flight and
/// frees all units, so that the next step can begin. Call it on every rank.
TESSERA_API void recover(torch::nn::Module& module);

} // namespace tessera
