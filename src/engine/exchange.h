// Moves tensors that are cut like parameters between their ranks.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/layout.h"

namespace tessera::engine {

/// How a parameter is cut over the ranks of its shard group: in both layouts
/// each rank has one range of its flattened elements, in the order of the
/// ranks.
struct Cut {
  Shape shape;
  std::vector<int64_t> numels; // by rank

  static Cut of(const Layout& layout, size_t param);
};

/// This rank's part of a parameter, or of state of its shape: flattened and
/// contiguous.
struct Part {
  Cut cut;
  at::Tensor mine;
};

/// Assembles whole tensors from every rank's parts, in one exchange. With a
/// `root` the result is defined only there, otherwise on all ranks. Only ranks
/// that get the whole tensors need memory for them. Collective.
std::vector<at::Tensor> gather(
    const std::vector<Part>& parts,
    const Group& group,
    std::optional<int> root,
    std::string_view label);

/// Fills every rank's parts from `wholes`, which only `root` needs to have and
/// which must be contiguous. Collective.
void scatter(
    const std::vector<at::Tensor>& wholes,
    const std::vector<Part>& parts,
    const Group& group,
    int root,
    std::string_view label);

} // namespace tessera::engine
