// The parameter that an optimizer's tensor is a part of.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "engine/exchange.h"

namespace tessera::engine {
class Unit;
}

namespace tessera::optim {

/// Null for a tensor that is no shard.
engine::Unit* unit_of_shard(const at::Tensor& param);

struct ShardOrigin {
  std::string name; // below the module of the root unit
  engine::Cut cut; // the whole shape, and how much each rank has
  Group group; // the ranks that have the parts
};

/// Nothing for a tensor that is no shard, and for a flat shard of several
/// parameters. Not collective.
std::optional<ShardOrigin> find_origin(const at::Tensor& param);

/// The name of the unit whose one flat shard this is; nothing for other
/// tensors.
std::optional<std::string> unit_of_flat_shard(const at::Tensor& param);

} // namespace tessera::optim
