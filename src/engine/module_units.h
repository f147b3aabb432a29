// The units of a module, found from its parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string_view>
#include <vector>

#include "engine/unit.h"

namespace tessera::engine {

/// All parameters of the module in pre-order; tied parameters appear once,
/// under their first name.
std::vector<NamedParam> distinct_parameters(const torch::nn::Module& module);

/// The units of the module's parameters, and the units without parameters
/// whose modules lie in it: in the pre-order of their modules, outer ones
/// first. A unit that extends beyond the module comes last.
std::vector<std::shared_ptr<Unit>> units_in(const torch::nn::Module& module);

/// Like units_in(), but throws if one of the units is inside
/// summon_full_params.
std::vector<std::shared_ptr<Unit>> units_not_summoned(
    const torch::nn::Module& module,
    std::string_view call);

/// Frees the full parameters that the module's units have gathered.
void reshard_units(const torch::nn::Module& module, std::string_view call);

/// The unit that sharding this very module made, or nullptr.
std::shared_ptr<Unit> unit_at(const torch::nn::Module& module);

/// A unit without parameters is not attached to anything that its module owns,
/// so it is stored here as long as the module lives.
void remember(
    const torch::nn::Module& module,
    const std::shared_ptr<Unit>& unit);

} // namespace tessera::engine
