// What fully_shard and FSDP ask for.
#pragma once

#include <tessera/fsdp/wrap_policy.h>
#include <tessera/transfer/state_dict_type.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <unordered_set>

#include "engine/unit_options.h"

namespace tessera::fsdp {

struct ShardRequest {
  const char* call = "fully_shard"; // for errors
  std::string description; // of the options, for ranks to compare
  engine::Groups groups;
  engine::UnitOptions unit;
  std::optional<WrapPolicy> policy = std::nullopt;
  std::unordered_set<const c10::TensorImpl*> ignored_params = {};
  std::unordered_set<const torch::nn::Module*> ignored_modules = {};
  /// All ranks take rank 0's buffers; UnitOptions say whether they take its
  /// parameters.
  bool sync_buffers = false;
  /// As in FSDP1: a unit with several dtypes is refused and, with one leaf, a
  /// unit that is frozen in part.
  bool uniform = false;
  /// The state_dict_type that the units start with.
  StateDictType state_dict_type = StateDictType::ShardedStateDict;
};

} // namespace tessera::fsdp
