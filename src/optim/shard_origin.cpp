#include "optim/shard_origin.h"

#include "engine/owners.h"
#include "engine/unit.h"

namespace tessera::optim {

engine::Unit* unit_of_shard(const at::Tensor& param) {
  if (!param.has_storage()) {
    return nullptr;
  }
  const auto owner = engine::find_owner(engine::storage_of(param));
  return owner.is_shard ? owner.unit : nullptr;
}

std::optional<ShardOrigin> find_origin(const at::Tensor& param) {
  const engine::Unit* unit = unit_of_shard(param);
  if (unit == nullptr || unit->options().one_leaf) {
    return std::nullopt;
  }
  for (const engine::UnitParam& one : unit->params().all()) {
    if (one.leaf.is_same(param)) {
      return ShardOrigin{
          unit->is_root() ? one.name : unit->name() + "." + one.name,
          engine::Cut::of(unit->bundles()[one.bundle].layout(), one.index),
          unit->groups().shard};
    }
  }
  return std::nullopt;
}

std::optional<std::string> unit_of_flat_shard(const at::Tensor& param) {
  const engine::Unit* unit = unit_of_shard(param);
  return unit != nullptr && unit->options().one_leaf
      ? std::optional(unit->name())
      : std::nullopt;
}

} // namespace tessera::optim
