// Moving what is cut like a parameter between its ranks.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "shard/layout.h"

namespace tessera::shard {

/// How a parameter is cut over the ranks of its shard group: in both layouts
/// each rank has one range of its flattened elements, in the order of the
/// ranks.
struct Cut {
  Shape shape;
  std::vector<int64_t> numels; // by rank

  static Cut of(const Layout& layout, size_t param);
};

/// The whole from every rank's part, which is flattened and contiguous: on
/// `root`, and undefined elsewhere, or without one on all ranks. Only ranks
/// that get it need memory for it. Collective.
at::Tensor gather(
    const Cut& cut,
    const at::Tensor& part,
    const Group& group,
    std::optional<int> root,
    std::string_view label);

/// Fills every rank's `part` from `whole`, which only `root` needs to have.
/// Collective.
void scatter(
    const Cut& cut,
    const at::Tensor& whole,
    const at::Tensor& part,
    const Group& group,
    int root,
    std::string_view label);

} // namespace tessera::shard
