#include "state/part_of.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "engine/owners.h"
#include "engine/unit.h"

namespace tessera::state {

std::optional<PartOf> find_part_of(
    const at::Tensor& tensor,
    const std::string& parameter) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return std::nullopt;
  }
  const engine::StorageOwner owner =
      engine::find_owner(engine::storage_of(tensor));
  if (owner.unit == nullptr || !owner.is_shard) {
    return std::nullopt;
  }
  const Group& group = owner.unit->groups().shard;
  if (group.size() == 1) {
    return std::nullopt;
  }
  return PartOf{
      .parameter = parameter,
      .unit = owner.unit->name(),
      .rank = group.rank(),
      .num_ranks = group.size()};
}

std::optional<PartOf> find_part_of(
    const StateValue& value,
    const std::string& parameter) {
  if (value.part_of() != nullptr) {
    return *value.part_of();
  }
  return value.is_tensor() ? find_part_of(value.tensor(), parameter)
                           : std::nullopt;
}

std::string to_string(const PartOf& part) {
  return fmt::format(
      "rank {}'s part of parameter \"{}\", which unit \"{}\" shards over {} ranks",
      part.rank,
      part.parameter,
      part.unit,
      part.num_ranks);
}

StateValue marked_as_part(const StateValue& value, const PartOf& origin) {
  if (value.is_tensor()) {
    return value.tensor().defined() && value.tensor().dim() > 0
        ? StateValue::part(value.tensor(), origin)
        : value;
  }
  if (value.is_list()) {
    StateList marked;
    for (const StateValue& item : value.list()) {
      marked.push_back(marked_as_part(item, origin));
    }
    return marked;
  }
  if (value.is_dict()) {
    StateDict marked;
    for (const auto& [key, item] : value.dict()) {
      marked.set(key, marked_as_part(item, origin));
    }
    return marked;
  }
  return value;
}

} // namespace tessera::state
