#include "fsdp/model_params.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>

#include "fsdp/module_units.h"
#include "shard/alias.h"
#include "shard/boxes.h"
#include "shard/names.h"

namespace tessera::fsdp {

const shard::Layout& ModelParam::layout() const {
  return unit->bundles()[place.bundle].layout();
}

std::vector<int64_t> ModelParam::shape() const {
  return is_sharded() ? layout().shape(place.index) : face.sizes().vec();
}

shard::Run ModelParam::run() const {
  return is_sharded() ? layout().run(place.index, unit->groups().shard.rank())
                      : shard::Run{0, 0, face.numel()};
}

shard::Cut ModelParam::cut() const {
  return is_sharded() ? shard::Cut::of(layout(), place.index)
                      : shard::Cut{shape(), {face.numel()}};
}

at::Tensor ModelParam::part_of(const at::Tensor& like_leaf) const {
  const shard::Run part = run();
  const at::Tensor flat = like_leaf.detach().reshape({-1});
  return is_flat() ? flat.narrow(0, part.shard_begin, part.numel) : flat;
}

at::Tensor ModelParam::own_part() const {
  if (!is_sharded()) {
    return face.detach().view({-1});
  }
  const shard::Run part = run();
  return shard::alias_of(
      unit->bundles()[place.bundle].shard(),
      {part.numel},
      part.shard_begin,
      /*with_key=*/true);
}

at::Tensor ModelParam::gather(
    const at::Tensor& part,
    std::optional<int> root,
    std::string_view label) const {
  const Group& group = unit->groups().shard;
  std::optional<int> root_in_group;
  if (root) {
    const auto& ranks = group.global_ranks();
    const auto found = std::find(ranks.begin(), ranks.end(), *root);
    if (found == ranks.end()) {
      return {}; // another copy of the model sends it
    }
    root_in_group = static_cast<int>(found - ranks.begin());
  }
  return shard::gather(cut(), part.contiguous(), group, root_in_group, label);
}

/// To the ranks of the root's copy of the model, and on to other copies.
void ModelParam::scatter(
    const at::Tensor& whole,
    const at::Tensor& part,
    int root,
    std::string_view label) const {
  const shard::Groups& groups = unit->groups();
  const auto& ranks = groups.shard.global_ranks();
  const auto found = std::find(ranks.begin(), ranks.end(), root);
  if (found != ranks.end()) {
    shard::scatter(
        cut(),
        whole.defined() ? whole.to(part.device()) : whole,
        part,
        groups.shard,
        static_cast<int>(found - ranks.begin()),
        label);
  }
  if (groups.replicate.valid()) {
    groups.replicate.broadcast(part, 0, label);
  }
}

ShardedTensor ModelParam::sharded(const at::Tensor& like_leaf) const {
  const at::Tensor part = part_of(like_leaf);
  std::vector<ShardedTensor::Piece> pieces;
  int64_t begin = 0;
  const shard::Run range = run();
  for (Box& box : shard::boxes_of(shape(), range.param_begin, range.numel)) {
    const int64_t numel = box.numel();
    at::Tensor piece = part.narrow(0, begin, numel).view(box.sizes);
    pieces.push_back({std::move(box), std::move(piece)});
    begin += numel;
  }
  return {shape(), part.scalar_type(), std::move(pieces), unit->groups().shard};
}

ModelParams::ModelParams(torch::nn::Module& module, std::string_view call)
    : call_(call) {
  for (shard::NamedParam& named : distinct_parameters(module)) {
    ModelParam param{named.name, named.tensor, named.tensor, nullptr, {}};
    if (shard::Unit* unit = shard::unit_of(named.tensor)) {
      if (unit->state() == shard::UnitState::Summoned) {
        raise(
            {.call = call, .unit = unit->name(), .parameter = named.name},
            "inside summon_full_params, whose changes are not in the shards yet. Close the guard first.");
      }
      const auto* face = named.tensor.unsafeGetTensorImpl();
      param.unit = unit->shared_from_this();
      param.place = unit->place_of(face);
      param.leaf = unit->leaf_of(face);
    }
    by_name_.emplace(param.name, params_.size());
    by_leaf_[param.leaf.unsafeGetTensorImpl()].push_back(params_.size());
    params_.push_back(std::move(param));
  }
  for (auto& [leaf, members] : by_leaf_) {
    std::sort(members.begin(), members.end(), [this](size_t a, size_t b) {
      return params_[a].place.index < params_[b].place.index;
    });
  }
  for (const auto& unit : units_in(module)) {
    const Group& group = unit->groups().all;
    const bool is_new =
        std::none_of(groups_.begin(), groups_.end(), [&](const Group& other) {
          return other.name() == group.name();
        });
    if (is_new) {
      groups_.push_back(group);
    }
  }
}

const ModelParam* ModelParams::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &params_[found->second];
}

std::vector<const ModelParam*> ModelParams::held_by(
    const at::Tensor& leaf) const {
  std::vector<const ModelParam*> result;
  const auto found = by_leaf_.find(leaf.unsafeGetTensorImpl());
  if (found == by_leaf_.end()) {
    return result;
  }
  for (const size_t index : found->second) {
    result.push_back(&params_[index]);
  }
  const ModelParam& first = *result.front();
  if (first.is_flat() && result.size() != first.layout().num_params()) {
    raise(
        {.call = call_, .unit = first.unit->name(), .parameter = first.name},
        fmt::format(
            "this module has {} of the {} parameters that make up one flat parameter. Pass the module that FSDP was given.",
            result.size(),
            first.layout().num_params()));
  }
  return result;
}

std::vector<std::string> ModelParams::names() const {
  std::vector<std::string> result;
  for (const ModelParam& param : params_) {
    result.push_back(param.name);
  }
  return result;
}

namespace {

void add_entries(
    const torch::nn::Module& module,
    const std::string& prefix,
    std::vector<StateEntry>& entries) {
  const auto add = [&](const auto& items, bool are_buffers) {
    for (const auto& item : items) {
      if (item.value().defined()) {
        entries.push_back(
            {shard::clean_name(prefix + item.key()),
             item.value(),
             are_buffers});
      }
    }
  };
  add(module.named_parameters(/*recurse=*/false), false);
  add(module.named_buffers(/*recurse=*/false), true);
  for (const auto& child : module.named_children()) {
    add_entries(*child.value(), prefix + child.key() + ".", entries);
  }
}

} // namespace

std::vector<StateEntry> state_entries(const torch::nn::Module& module) {
  std::vector<StateEntry> entries;
  add_entries(module, "", entries);
  return entries;
}

} // namespace tessera::fsdp
