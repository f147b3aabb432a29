#include "exported/refused_inputs.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "comm/group/group_impl.h"
#include "ddp/reducer.h"
#include "engine/module_units.h"

namespace tessera::exported {
namespace {

/// The ranks that run a forward together.
struct Partners {
  std::string step; // alike on all ranks that begin the same forward
  std::vector<Group> groups; // the first one has them all; may be empty
};

Partners partners_of_shards(
    const torch::nn::Module& model,
    const ForwardNumber& number) {
  Partners partners;
  for (const auto& unit : engine::units_in(model)) {
    const engine::Groups& groups = unit->groups();
    if (partners.step.empty()) {
      partners.step =
          fmt::format("forward {} of {}", number.among_all, unit->label());
    }
    for (const Group* group : {&groups.all, &groups.shard, &groups.replicate}) {
      if (group->valid()) {
        partners.groups.push_back(*group);
      }
    }
  }
  return partners;
}

Partners partners_of_copies(
    const torch::nn::Module& model,
    const ForwardNumber& number) {
  Partners partners;
  if (!number.among_learning) {
    return partners;
  }
  partners.step = fmt::format("learning forward {}", *number.among_learning);
  const auto parameters = model.parameters();
  for (const ddp::Reducer* reducer : ddp::Reducer::all()) {
    const bool is_theirs = std::any_of(
        parameters.begin(), parameters.end(), [&](const at::Tensor& parameter) {
          return reducer->reduces(parameter);
        });
    if (reducer->syncs() && is_theirs) {
      partners.groups.push_back(reducer->group());
    }
  }
  return partners;
}

} // namespace

void refuse_together(
    const torch::nn::Module& model,
    const ForwardNumber& number,
    c10::Error& error) {
  Partners partners = partners_of_shards(model, number);
  if (partners.groups.empty()) {
    partners = partners_of_copies(model, number);
  }
  if (partners.groups.empty()) {
    return;
  }
  const std::string reason = error.what_without_backtrace();
  const bool all_refused =
      partners.groups.front().impl().refuse(partners.step, reason);
  if (all_refused) {
    return;
  }
  for (const Group& group : partners.groups) {
    group.impl().give_up(reason);
  }
  error.add_context(
      "Not all ranks refused this forward, so this rank has given up the groups of the model: the other ranks fail too, and these groups can no longer be used.");
}

} // namespace tessera::exported
