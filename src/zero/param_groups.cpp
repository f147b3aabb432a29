#include "zero/param_groups.h"

#include <c10/util/Exception.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unordered_set>

#include "base/fnv.h"
#include "engine/start.h"
#include "engine/unit.h"

namespace tessera::zero {

void check_group(
    const torch::optim::OptimizerParamGroup& group,
    const ParamGroups& earlier_groups,
    const ErrorSite& where) {
  const size_t index = earlier_groups.size();
  if (group.params().empty()) {
    raise<c10::ValueError>(
        where,
        fmt::format(
            "param group {} has no parameters. Pass their list.", index));
  }
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const torch::optim::OptimizerParamGroup& earlier : earlier_groups) {
    for (const at::Tensor& param : earlier.params()) {
      seen.insert(param.unsafeGetTensorImpl());
    }
  }
  const at::Tensor& first = earlier_groups.empty()
      ? group.params().front()
      : earlier_groups.front().params().front();
  for (size_t i = 0; i < group.params().size(); ++i) {
    const at::Tensor& param = group.params()[i];
    const std::string name = fmt::format("parameter {} of group {}", i, index);
    if (!param.defined()) {
      raise<c10::TypeError>(
          where,
          fmt::format(
              "params argument should be an iterable of Tensors, {} is undefined.",
              name));
    }
    if (engine::is_sharded(param)) {
      raise<c10::ValueError>(
          where,
          fmt::format(
              "{} is sharded by FSDP, where each rank already has state for its part only. Use the optimizer without ZeRO.",
              name));
    }
    if (!param.is_leaf()) {
      raise<c10::ValueError>(
          where,
          fmt::format(
              "can't optimize a non-leaf Tensor: {} was computed from others. Pass parameters.",
              name));
    }
    if (param.layout() != at::kStrided ||
        param.scalar_type() != first.scalar_type()) {
      raise<c10::ValueError>(
          where,
          fmt::format(
              "ZeroRedundancyOptimizer only supports using the same dense type for all parameters, {} is {}, parameter 0 of group 0 is {}. Make an optimizer for each type.",
              name,
              param.toString(),
              first.toString()));
    }
    if (!seen.insert(param.unsafeGetTensorImpl()).second) {
      raise<c10::ValueError>(
          where,
          fmt::format(
              "{} was given before. Pass each once; tessera::parameters(module) lists tied ones once.",
              name));
    }
  }
}

std::vector<std::string> describe(const ParamGroups& groups) {
  std::vector<std::string> items;
  for (size_t i = 0; i < groups.size(); ++i) {
    items.push_back(fmt::format(
        "param group {}: {} parameters", i, groups[i].params().size()));
    for (const at::Tensor& param : groups[i].params()) {
      items.push_back(fmt::format(
          "param group {}: {}{}",
          i,
          c10::toString(param.scalar_type()),
          param.sizes().vec()));
    }
  }
  return items;
}

void warn_of_unequal_values(const Group& group, const ParamGroups& groups) {
  if (group.size() == 1) {
    return;
  }
  uint64_t digest = kFnvStart;
  for (const auto& one : groups) {
    for (const at::Tensor& param : one.params()) {
      digest = mix_digest(digest, engine::digest_of(param));
    }
  }
  const bool is_same = engine::is_same_on_all(
      digest, group, "ZeroRedundancyOptimizer: values before the first step");
  if (!is_same && group.rank() == 0) {
    TORCH_WARN(
        "ZeroRedundancyOptimizer: the ranks have different parameters before the first step, so the step makes one model of parts of several. Call tessera::seed(0) on every rank before the model is built, load the model's state, or make a DistributedDataParallel of it first.");
  }
}

std::optional<std::string> objection_to_groups(
    const ParamGroups& groups,
    const Partition& partition,
    size_t num_local_groups) {
  const auto& added = partition.groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& params = groups[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      const auto place = partition.place_of(params[i]);
      if (!place) {
        return fmt::format(
            "parameter {} of group {} ({}) was added through torch::optim::Optimizer, so no rank owns it. Call ZeroRedundancyOptimizer::add_param_group().",
            i,
            group,
            params[i].sizes().vec());
      }
      if (place->group != group) {
        return fmt::format(
            "parameter {} of group {} ({}) was parameter {} of group {} when it was added, and its owner steps it with the options of that group. Leave it there, or make a new ZeroRedundancyOptimizer of the groups and load the state into it.",
            i,
            group,
            params[i].sizes().vec(),
            place->index,
            place->group);
      }
    }
  }
  for (size_t group = 0; group < added.size(); ++group) {
    const size_t left =
        group < groups.size() ? groups[group].params().size() : 0;
    if (left != added[group].size()) {
      return fmt::format(
          "group {} was added with {} parameters and has {} now, but their owners continue to step them. Freeze what must not train, or make a new ZeroRedundancyOptimizer of the groups and load the state into it.",
          group,
          added[group].size(),
          left);
    }
  }
  if (groups.size() != num_local_groups) {
    return fmt::format(
        "there are {} groups, and {} in the local optimizer. Call ZeroRedundancyOptimizer::add_param_group() alone.",
        groups.size(),
        num_local_groups);
  }
  return std::nullopt;
}

} // namespace tessera::zero
