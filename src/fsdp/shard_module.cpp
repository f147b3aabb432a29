#include "fsdp/shard_module.h"

#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/group/group_impl.h"
#include "deferred/replay.h"
#include "engine/module_units.h"
#include "engine/names.h"
#include "engine/schedule.h"
#include "engine/unit.h"
#include "fsdp/unit_plan.h"
#include "transfer/state_settings.h"

namespace tessera::fsdp {
namespace {

using engine::Schedule;
using engine::Unit;

/// Counts the units of each group; equal on all ranks, because the calls are. A
/// schedule cannot count them: it is destroyed with its last unit, at a time
/// that differs between ranks.
struct UnitCounts {
  struct Count {
    std::weak_ptr<comm::GroupImpl> group;
    int number = 0;
  };
  Mutex mutex;
  std::map<const comm::GroupImpl*, Count> by_group TESSERA_GUARDED_BY(mutex);
};

/// Never destroyed: models may be sharded as late as in a static destructor.
UnitCounts& unit_counts() {
  static auto& instance = *new UnitCounts;
  return instance;
}

int next_unit_number(const Group& group) {
  UnitCounts& counts = unit_counts();
  const MutexLock lock(counts.mutex);
  std::erase_if(counts.by_group, [](const auto& entry) {
    return entry.second.group.expired();
  });
  UnitCounts::Count& count = counts.by_group[&group.impl()];
  count.group = group.impl().weak_from_this();
  return count.number++;
}

/// Names the units inside `module` by their place in it, and makes `module` the
/// parent of those that have none.
void adopt(torch::nn::Module& module, const std::shared_ptr<Unit>& parent) {
  auto inner = engine::units_in(module);
  // Leaves out units that only a tied parameter leads to.
  const auto inside = modules_in(module);
  std::erase_if(inner, [&](const auto& unit) {
    return unit->home() != nullptr && !inside.contains(unit->home());
  });
  for (const auto& unit : inner) {
    if (unit->is_root() && unit != parent) {
      unit->set_parent(parent);
    }
  }
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    for (const auto& unit : inner) {
      if (unit->home() == item.value().get()) {
        unit->set_name(engine::clean_name(item.key()));
      }
    }
  }
}

void broadcast_buffers(torch::nn::Module& module, const Group& group) {
  at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (seen.insert(buffer.unsafeGetTensorImpl()).second) {
      const at::Tensor whole = buffer.contiguous();
      group.broadcast(whole, 0, item.key());
      if (!whole.is_same(buffer)) {
        buffer.copy_(whole);
      }
    }
  }
}

/// Cuts the shards of all units, and gives buffers and ignored parameters
/// memory.
void add_units(
    torch::nn::Module& module,
    const std::vector<UnitPlan>& plans,
    const ShardRequest& request) {
  const Group& all = request.groups.all;
  std::vector<int> numbers; // also of units that one rank fails to make
  for (size_t i = 0; i < plans.size(); ++i) {
    numbers.push_back(next_unit_number(all));
  }
  const auto schedule = Schedule::of(all);
  for (size_t i = 0; i < plans.size(); ++i) {
    const UnitPlan& plan = plans[i];
    // A unit has its class's name until a larger module gives it a place.
    auto unit = schedule->add_unit(
        plan.module->name(),
        numbers[i],
        plan.params,
        request.groups,
        request.unit);
    unit->set_home(plan.module, plan.module->weak_from_this());
    transfer::set_settings(
        *unit, StateDictSettings::of(request.state_dict_type));
    if (unit->bundles().empty()) {
      engine::remember(*plan.module, unit);
    }
    adopt(*plan.module, unit);
  }
  materialize(module);
}

/// Values of deferred parameters may come from a file that one rank cannot
/// read. All ranks fail then; where rank 0 sends its values, the others wait
/// for it inside, and learn that it is gone.
void shard_together(
    torch::nn::Module& module,
    const std::vector<UnitPlan>& plans,
    const ShardRequest& request) {
  const Group& all = request.groups.all;
  if (all.size() == 1 || request.unit.sync_from_rank0) {
    add_units(module, plans, request);
    return;
  }
  std::optional<std::string> failure;
  try {
    add_units(module, plans, request);
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  if (failure) {
    *failure +=
        " The model is sharded in part: make it again before the next attempt.";
  }
  fail_together(all, request.call, failure);
}

} // namespace

void shard_module(torch::nn::Module& module, const ShardRequest& request) {
  for (const auto& dtype :
       {request.unit.param_dtype, request.unit.reduce_dtype}) {
    if (dtype && !c10::isFloatingType(*dtype)) {
      raise<c10::ValueError>(
          {.call = request.call},
          fmt::format(
              "{} is not a floating-point dtype; units cannot compute or reduce in it.",
              c10::toString(*dtype)));
    }
  }
  if (request.unit.keep_cast_shards &&
      (!request.unit.param_dtype || request.unit.offload)) {
    raise<c10::ValueError>(
        {.call = request.call},
        request.unit.offload
            ? "keep_cast_shards takes device memory for a second copy of the shards, and offloading keeps the shards in host memory to save device memory. Choose one of the two."
            : "keep_cast_shards needs param_dtype: without it, nothing is cast.");
  }
  const Group& all = request.groups.all;
  const auto plans = plan_units(module, request);

  std::vector<std::string> items{
      fmt::format("module {}", module.name()), request.description};
  for (std::string& line : describe(plans)) {
    items.push_back(std::move(line));
  }
  agree(all, request.call, items);
  fail_together(all, request.call, objection_to(plans, module, request));

  shard_together(module, plans, request);
  if (request.sync_buffers) {
    broadcast_buffers(module, all);
  }
}

engine::Groups groups_of(const Mesh& mesh, const char* call) {
  const auto& axes = mesh.axis_names();
  if (axes.size() == 1) {
    return {.all = mesh.group(axes[0]), .shard = mesh.group(axes[0])};
  }
  if (axes.size() != 2) {
    raise(
        {.call = call},
        fmt::format(
            "{} has {} axes; expected one to shard over, or two: copies, then shards. Use mesh.submesh({{...}}).",
            mesh.to_string(),
            axes.size()));
  }
  engine::Groups groups{.all = mesh.group(), .shard = mesh.group(axes[1])};
  if (mesh.size(axes[0]) > 1) {
    groups.replicate = mesh.group(axes[0]);
  }
  return groups;
}

} // namespace tessera::fsdp
