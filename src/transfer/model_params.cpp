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
  return libtorch::alias_of(
      unit->bundles()[place.bundle].shard(),
      {part.numel},
      part.shard_begin,
      engine::kShardKeys);
}

ShardedTensor ModelParam::sharded(const at::Tensor& part) const {
  std::vector<ShardedTensor::Piece> pieces;
  int64_t begin = 0;
  const engine::Run range = run();
  for (ShardedTensor::Box& box :
       engine::boxes_of(shape(), range.param_begin, range.numel)) {
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

} // namespace tessera::transfer
