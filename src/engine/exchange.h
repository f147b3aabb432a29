// Moving what is cut like parameters between its ranks.
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

/// What this rank has of a parameter, or of state of its shape: flattened and
/// contiguous.
struct Part {
  Cut cut;
  at::Tensor mine;
};

/// The wholes from every rank's parts, in one exchange: on `root`, and
/// undefined elsewhere, or without one on all ranks. Only ranks that get them
/// need memory for them. Collective.
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
