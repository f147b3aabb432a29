#include "transfer/model_params.h"

#include <tessera/comm/init.h>
#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "engine/boxes.h"
#include "engine/first_touch.h"
#include "engine/module_units.h"
#include "engine/names.h"
#include "libtorch/alias.h"

namespace tessera::transfer {

const engine::Layout& ModelParam::layout() const {
  return unit->bundles()[place.bundle].layout();
}

std::vector<int64_t> ModelParam::shape() const {
  return is_sharded() ? layout().shape(place.index) : face.sizes().vec();
}

engine::Run ModelParam::run() const {
  return is_sharded() ? layout().run(place.index, unit->groups().shard.rank())
                      : engine::Run{0, 0, face.numel()};
}

engine::Cut ModelParam::cut() const {
  return is_sharded() ? engine::Cut::of(layout(), place.index)
                      : engine::Cut{shape(), {face.numel()}};
}

at::Tensor ModelParam::part_of(const at::Tensor& like_leaf) const {
  const engine::Run part = run();
  const at::Tensor flat = like_leaf.detach().reshape({-1});
  return is_flat() ? flat.narrow(0, part.shard_begin, part.numel) : flat;
}

at::Tensor ModelParam::own_part() const {
  if (!is_sharded()) {
    return face.detach().view({-1});
  }
  const engine::Run part = run();
  return engine::alias_of(
      unit->bundles()[place.bundle].shard(),
      {part.numel},
      part.shard_begin,
      engine::kShardKeys);
}

ShardedTensor ModelParam::sharded(const at::Tensor& part) const {
  std::vector<ShardedTensor::Piece> pieces;
  int64_t begin = 0;
  const engine::Run range = run();
  for (Box& box : engine::boxes_of(shape(), range.param_begin, range.numel)) {
    const int64_t numel = box.numel();
    at::Tensor piece = part.narrow(0, begin, numel).view(box.sizes);
    pieces.push_back({std::move(box), std::move(piece)});
    begin += numel;
  }
  return {
      shape(),
      part.scalar_type(),
      std::move(pieces),
      unit->groups().shard,
      part};
}

ModelParams::ModelParams(torch::nn::Module& module, std::string_view call)
    : call_(call) {
  for (engine::NamedParam& named : engine::distinct_parameters(module)) {
    ModelParam param{named.name, named.tensor, named.tensor, nullptr, {}};
    if (engine::Unit* unit = engine::unit_of(named.tensor)) {
      if (unit->state() == engine::UnitState::Summoned) {
        raise(
            {.call = call, .unit = unit->name(), .parameter = named.name},
            "inside summon_full_params, whose changes are not in the shards yet. Close the guard first.");
      }
      const auto* face = named.tensor.unsafeGetTensorImpl();
      param.unit = unit->shared_from_this();
      param.place = unit->params().place_of(face);
      param.leaf = unit->params().leaf_of(face);
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
  for (const auto& unit : engine::units_in(module)) {
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

Group ModelParams::root_group() const {
  if (!groups_.empty()) {
    return groups_.front();
  }
  return is_initialized() ? world() : Group();
}

std::vector<std::string> ModelParams::names() const {
  std::vector<std::string> result;
  for (const ModelParam& param : params_) {
    result.push_back(param.name);
  }
  return result;
}

namespace {

/// Positions in `parts` of each unit's, in the order of the units' first.
std::vector<std::vector<size_t>> by_unit(const std::vector<ParamPart>& parts) {
  std::vector<std::vector<size_t>> result;
  std::unordered_map<const engine::Unit*, size_t> places;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto [place, is_new] =
        places.emplace(parts[i].param->unit.get(), result.size());
    if (is_new) {
      result.emplace_back();
    }
    result[place->second].push_back(i);
  }
  return result;
}

/// Where that rank of the world is in the group, if it is.
std::optional<int> rank_in(const Group& group, int rank) {
  const auto& ranks = group.global_ranks();
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end()
      ? std::nullopt
      : std::optional(static_cast<int>(found - ranks.begin()));
}

} // namespace

std::vector<at::Tensor> gather(
    const std::vector<ParamPart>& parts,
    std::optional<int> root,
    bool to_cpu) {
  std::vector<at::Tensor> wholes(parts.size());
  for (const auto& indices : by_unit(parts)) {
    const engine::Unit& unit = *parts[indices.front()].param->unit;
    const Group& group = unit.groups().shard;
    const auto root_here = root ? rank_in(group, *root) : std::nullopt;
    if (root && !root_here) {
      continue; // another copy of the model sends it
    }
    std::vector<engine::Part> cut;
    for (const size_t i : indices) {
      cut.push_back({parts[i].param->cut(), parts[i].mine.contiguous()});
    }
    const auto gathered = engine::gather(cut, group, root_here, unit.name());
    for (size_t i = 0; i < indices.size(); ++i) {
      wholes[indices[i]] =
          to_cpu && gathered[i].defined() ? gathered[i].cpu() : gathered[i];
    }
  }
  return wholes;
}

void check_root(const ModelParam& param, int root, std::string_view call) {
  const Group& all = param.unit->groups().all;
  if (!rank_in(all, root)) {
    raise<c10::ValueError>(
        {.call = call, .unit = param.unit->name(), .parameter = param.name},
        fmt::format(
            "its unit is spread over the ranks {}, and rank {} is not among them. Choose a group whose rank 0 is.",
            fmt::join(all.global_ranks(), ", "),
            root));
  }
}

/// To the ranks of the root's copy of the model, and on to other copies.
void scatter(
    const std::vector<at::Tensor>& wholes,
    const std::vector<ParamPart>& parts,
    int root) {
  for (const auto& indices : by_unit(parts)) {
    const engine::Unit& unit = *parts[indices.front()].param->unit;
    const engine::Groups& groups = unit.groups();
    if (const auto root_here = rank_in(groups.shard, root)) {
      std::vector<engine::Part> cut;
      std::vector<at::Tensor> whole;
      for (const size_t i : indices) {
        cut.push_back({parts[i].param->cut(), parts[i].mine});
        whole.push_back(
            wholes[i].defined()
                ? wholes[i].detach().to(parts[i].mine.device()).contiguous()
                : at::Tensor());
      }
      engine::scatter(whole, cut, groups.shard, *root_here, unit.name());
    }
    if (groups.replicate.valid()) {
      // Ranks of a group come copy by copy.
      const int copy = *rank_in(groups.all, root) / groups.shard.size();
      for (const size_t i : indices) {
        groups.replicate.broadcast(parts[i].mine, copy, parts[i].param->name);
      }
    }
  }
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
            {engine::clean_name(prefix + item.key()),
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

} // namespace tessera::transfer
