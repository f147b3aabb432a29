// What fully_shard and FSDP have in common.
#pragma once

#include <tessera/comm/mesh.h>
#include <tessera/fsdp/wrap_policy.h>
#include <tessera/transfer/state_dict_type.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/options.h"

namespace tessera::fsdp {

struct ShardRequest {
  const char* call = "fully_shard"; // for errors
  std::string description; // of the options, for ranks to compare
  engine::Groups groups;
  engine::UnitOptions unit;
  std::optional<WrapPolicy> policy = std::nullopt;
  std::unordered_set<const c10::TensorImpl*> ignored_params = {};
  std::unordered_set<const torch::nn::Module*> ignored_modules = {};
  /// Rank 0's buffers are taken by all; its parameters by UnitOptions.
  bool sync_buffers = false;
  /// FSDP1 refuses several dtypes in a unit, and, with one leaf, partly frozen
  /// ones.
  bool uniform = false;
  /// What state dicts of the units hold at first.
  StateDictType state_dict_type = StateDictType::ShardedStateDict;
};

/// Makes `module` a unit, and before it the submodules that the policy names.
/// Collective over groups.all; throws on all ranks with nothing changed.
void shard_module(torch::nn::Module& module, const ShardRequest& request);

/// The ranks of a mesh in their roles: one axis shards; of two the first
/// replicates.
engine::Groups groups_of(const Mesh& mesh, const char* call);

} // namespace tessera::fsdp
