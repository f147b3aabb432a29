#include "optim/tell_engine.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "engine/plain_params.h"
#include "engine/schedule.h"
#include "engine/unit.h"
#include "optim/shard_origin.h"

namespace tessera::optim {
namespace {

bool contains(const std::vector<int>& ranks, const std::vector<int>& others) {
  return std::all_of(others.begin(), others.end(), [&](int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  });
}

/// Of several groups the smallest: whichever model a parameter belongs to, its
/// copies are alike on these ranks, if they are ranks of all groups. Null if
/// there is no such group.
engine::Unit* unit_of_narrowest_group(const std::vector<engine::Unit*>& units) {
  const auto ranks_of = [](const engine::Unit* unit) -> const auto& {
    return unit->groups().all.global_ranks();
  };
  engine::Unit* narrowest = nullptr;
  for (engine::Unit* unit : units) {
    if (narrowest == nullptr ||
        ranks_of(unit).size() < ranks_of(narrowest).size()) {
      narrowest = unit;
    }
  }
  const bool is_in_all =
      std::all_of(units.begin(), units.end(), [&](const engine::Unit* unit) {
        return contains(ranks_of(unit), ranks_of(narrowest));
      });
  return is_in_all ? narrowest : nullptr;
}

} // namespace

void tell_of_step(const ParamGroups& groups) {
  if (!engine::is_any_averaged()) {
    return;
  }
  std::vector<at::Tensor> params;
  for (const auto& group : groups) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  engine::note_step(params);
}

void watch_plain_params(
    const ParamGroups& groups,
    const std::string& name,
    const std::shared_ptr<const void>& part) {
  struct Plain {
    at::Tensor tensor;
    size_t group;
    size_t index;
  };
  std::vector<engine::Unit*> units; // one for each schedule
  std::vector<Plain> plain;
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& params = groups[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      engine::Unit* unit = unit_of_shard(params[i]);
      if (unit == nullptr) {
        plain.push_back({params[i], group, i});
        continue;
      }
      const bool is_known =
          std::any_of(units.begin(), units.end(), [&](engine::Unit* other) {
            return &other->schedule() == &unit->schedule();
          });
      if (!is_known) {
        units.push_back(unit);
      }
    }
  }
  engine::Unit* unit = unit_of_narrowest_group(units);
  if (unit == nullptr) {
    return;
  }
  for (const auto& [tensor, group, index] : plain) {
    unit->schedule().check().plain().add_stepped(
        fmt::format(
            "parameter {} of param group {} of {}, of shape [{}]",
            index,
            group,
            name,
            fmt::join(tensor.sizes(), ", ")),
        tensor,
        part);
  }
}

} // namespace tessera::optim
