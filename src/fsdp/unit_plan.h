// The units that a module and its submodules will become.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/unit_params.h"
#include "fsdp/shard_request.h"

namespace tessera::fsdp {

/// A unit to be made: its module and the parameters that it will take.
struct UnitPlan {
  torch::nn::Module* module = nullptr;
  std::string name; // below the module that was asked for; empty: itself
  std::vector<engine::NamedParam> params;
};

/// The units to make of `module`, inner ones first, as the policy says; the
/// last one is `module` itself. Changes nothing.
std::vector<UnitPlan> plan_units(
    torch::nn::Module& module,
    const ShardRequest& request);

/// The plans as lines that ranks can compare.
std::vector<std::string> describe(const std::vector<UnitPlan>& plans);

/// Why this rank cannot carry out the plans for `module`, if so; ranks may
/// differ.
std::optional<std::string> objection_to(
    const std::vector<UnitPlan>& plans,
    const torch::nn::Module& module,
    const ShardRequest& request);

/// Where a parameter is, or will be once its values are computed.
at::Device place_of(const at::Tensor& param);

/// A module and all modules below it, to be recognized by.
std::unordered_set<const void*> modules_in(const torch::nn::Module& root);

} // namespace tessera::fsdp
