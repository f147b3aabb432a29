#pragma once

#include <tessera/api.h>
#include <tessera/exported/exported.h>
#include <tessera/fsdp/wrap_policy.h>

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// Chooses modules of an exported model, for apply_activation_checkpointing()
/// and lambda_auto_wrap_policy().
using ModuleChoice = std::function<bool(const torch::nn::Module&)>;

/// Chooses the modules whose whole path the regular expression (ECMAScript)
/// matches: choose_by_path("model\\.layers\\.\\d+"). Throws c10::ValueError if
/// `expression` is not a regular expression.
TESSERA_API ModuleChoice choose_by_path(const std::string& expression);

/// Chooses the modules of these Python classes, given with their module
/// ("torch.nn.modules.linear.Linear") or without ("Linear").
TESSERA_API ModuleChoice choose_by_class(std::vector<std::string> names);

/// The paths of a model's repeated blocks: children 0, 1, 2, ... of one module
/// that have one class and parameters, the outermost of them. They make good
/// units and good parts to recompute. Empty if there are none.
TESSERA_API std::vector<std::string> repeated_blocks(const Exported& model);

/// The policy that makes each of repeated_blocks() a unit, with a warning if
/// there are none:
///
///   tessera::fully_shard(
///       model, tessera::FullyShardOptions().policy(block_policy(model)));
TESSERA_API WrapPolicy block_policy(const Exported& model);

} // namespace tessera
