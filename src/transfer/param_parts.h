// Parts of sharded parameters, gathered from all ranks or scattered to them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "transfer/model_params.h"

namespace tessera::transfer {

/// This rank's part of a sharded parameter, or of state that has the
/// parameter's shape; flattened.
struct ParamPart {
  const ModelParam* param = nullptr;
  at::Tensor mine;
};

/// Puts full tensors together from the parts of all ranks, unit by unit. With
/// `root`, a rank of the world, other ranks get undefined tensors; without it,
/// all ranks get the full tensors. Parts are in the same order on all ranks.
/// `to_cpu`: the full tensors end up in host memory. Collective.
std::vector<at::Tensor> gather(
    const std::vector<ParamPart>& parts,
    std::optional<int> root,
    bool to_cpu);

/// Throws c10::ValueError if the parameter cannot be filled from `root`, a rank
/// of the world, because the parameter's unit is not spread over that rank.
void check_root(const ModelParam& param, int root, std::string_view call);

/// Fills the parts of all ranks from the full tensors `wholes`, which only
/// `root` needs to have. See check_root(). Collective.
void scatter(
    const std::vector<at::Tensor>& wholes,
    const std::vector<ParamPart>& parts,
    int root);

} // namespace tessera::transfer
