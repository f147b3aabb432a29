// Makes units of a module and its submodules, for fully_shard and FSDP.
#pragma once

#include <tessera/comm/mesh.h>

#include <torch/nn/module.h>

#include "engine/unit_options.h"
#include "fsdp/shard_request.h"

namespace tessera::fsdp {

/// Makes `module` a unit, and before it the submodules that the policy names.
/// Collective over groups.all; throws on all ranks with nothing changed.
void shard_module(torch::nn::Module& module, const ShardRequest& request);

/// The ranks of a mesh in their roles. A single axis shards; if there are two,
/// the first replicates and the second shards.
engine::Groups groups_of(const Mesh& mesh, const char* call);

} // namespace tessera::fsdp
