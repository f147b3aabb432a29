#include "exported/refused_inputs.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <string>

#include "comm/group/group_impl.h"
#include "engine/module_units.h"

namespace tessera::exported {

void refuse_together(
    const torch::nn::Module& model,
    int64_t number,
    c10::Error& error) {
  const auto units = engine::units_in(model);
  if (units.empty()) {
    return;
  }
  const std::string reason = error.what_without_backtrace();
  const engine::Unit& first = *units.front();
  const bool all_refused = first.groups().all.impl().refuse(
      fmt::format("forward {} of {}", number, first.label()), reason);
  if (all_refused) {
    return;
  }
  for (const auto& unit : units) {
    const engine::Groups& groups = unit->groups();
    for (const Group* group : {&groups.all, &groups.shard, &groups.replicate}) {
      if (group->valid()) {
        group->impl().give_up(reason);
      }
    }
  }
  error.add_context(
      "Not all ranks refused this forward, so this rank has given up the groups of the sharded model: the other ranks fail too, and the model can no longer be used.");
}

} // namespace tessera::exported
