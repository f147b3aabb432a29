#include "optim/sharded_state.h"

#include <ATen/ops/cat.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/owners.h"
#include "engine/unit.h"

namespace tessera::optim {
namespace {

using LeafParam = engine::UnitParams::LeafParam;

/// The parameter that `param` is a shard of; nothing for other tensors, and for
/// a flat shard of several parameters.
std::optional<LeafParam> find_leaf(const at::Tensor& param) {
  if (!param.has_storage()) {
    return std::nullopt;
  }
  const auto owner = engine::find_owner(engine::storage_of(param));
  return owner.unit != nullptr && owner.is_shard
      ? owner.unit->params().find_leaf(param.unsafeGetTensorImpl())
      : std::nullopt;
}

bool holds_sharded(const StateValue& value) {
  if (value.is_list()) {
    return std::any_of(value.list().begin(), value.list().end(), holds_sharded);
  }
  if (value.is_dict()) {
    return std::any_of(
        value.dict().begin(), value.dict().end(), [](const auto& item) {
          return holds_sharded(item.second);
        });
  }
  return value.is_sharded();
}

bool is_cut_as(const ShardedTensor& sharded, const LeafParam& leaf) {
  const auto& pieces = sharded.pieces();
  return sharded.sizes() == leaf.sizes &&
      std::equal(
             pieces.begin(),
             pieces.end(),
             leaf.boxes.begin(),
             leaf.boxes.end(),
             [](const ShardedTensor::Piece& piece,
                const ShardedTensor::Box& box) { return piece.box == box; });
}

at::Tensor local_part(const ShardedTensor& sharded, const at::Tensor& param) {
  std::vector<at::Tensor> parts;
  for (const ShardedTensor::Piece& piece : sharded.pieces()) {
    parts.push_back(piece.tensor.detach().reshape({-1}));
  }
  if (parts.empty()) {
    return param.detach().new_empty(param.sizes(), sharded.dtype());
  }
  const at::Tensor flat = parts.size() == 1 ? parts.front() : at::cat(parts);
  return flat.view(param.sizes());
}

} // namespace

void check_name(
    const std::string& name,
    const at::Tensor& param,
    const std::string& where,
    const ErrorSite& site) {
  const auto leaf = find_leaf(param);
  if (!leaf || name == leaf->name) {
    return;
  }
  // A dictionary of a larger model has a prefix before the names.
  const bool has_prefix = name.ends_with("." + leaf->name);
  if (!has_prefix) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "{} has the name \"{}\" where this optimizer has \"{}\". load_state_dict() goes by position: give the optimizer its parameters in the order of the dictionary, or call set_optimizer_state_dict(), which goes by names.",
            where,
            name,
            leaf->name));
  }
}

StateDict local_state(
    const at::Tensor& param,
    const StateDict& values,
    const ErrorSite& site) {
  StateDict result;
  for (const auto& [name, value] : values) {
    if (!holds_sharded(value)) {
      result.set(name, value);
      continue;
    }
    const auto leaf = find_leaf(param);
    if (!value.is_sharded() || !leaf) {
      raise<c10::TypeError>(
          site,
          fmt::format(
              "state \"{}\" {} a sharded tensor, and this optimizer {}. Call set_optimizer_state_dict(), which knows the layout.",
              name.text(),
              value.is_sharded() ? "is" : "contains",
              leaf ? "takes sharded tensors as values of their own"
                   : "does not step a shard of one parameter here"));
    }
    if (!is_cut_as(value.sharded(), *leaf)) {
      raise<c10::ValueError>(
          site,
          fmt::format(
              "state \"{}\" is a sharded tensor of shape [{}], of which this rank has {} elements; the optimizer's parameter \"{}\" has shape [{}], of which this rank has {} elements cut in another way. Call set_optimizer_state_dict(), which moves state between layouts.",
              name.text(),
              fmt::join(value.sharded().sizes(), ", "),
              value.sharded().local_numel(),
              leaf->name,
              fmt::join(leaf->sizes, ", "),
              param.numel()));
    }
    result.set(name, local_part(value.sharded(), param));
  }
  return result;
}

bool is_empty_part(const at::Tensor& param, const StateDict& values) {
  return param.numel() == 0 &&
      std::any_of(values.begin(), values.end(), [](const auto& item) {
           return item.second.is_sharded();
         });
}

} // namespace tessera::optim
