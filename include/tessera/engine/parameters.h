// The parameters of a module as optimizers get them.
#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Names and tensors, in the module's order.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The tensors to give an optimizer: for each parameter of the module, in its
/// order and once even if it is tied, this rank's shard, or the parameter
/// itself if it is not sharded. Frozen and empty shards are included, so that
/// all ranks get the same number. Every call returns the same tensors. An FSDP
/// unit without use_orig_params has one flat tensor, at the place of its
/// module.
///
/// Inside summon_full_params, where its parameters are shown, a unit's
/// parameters are the module's own.
TESSERA_API std::vector<at::Tensor> parameters(ModuleRef module);
/// The same with the module's names, `prefix` and a dot before each. Without
/// `recurse` only those that `module` itself registered. Names of wrappers for
/// activation checkpointing are left out.
TESSERA_API NamedTensors named_parameters(
    ModuleRef module,
    const std::string& prefix = "",
    bool recurse = true);
/// Buffers, which are never sharded, named in the same way.
TESSERA_API NamedTensors named_buffers(
    ModuleRef module,
    const std::string& prefix = "",
    bool recurse = true);

} // namespace tessera
