#include "fsdp/shard_module.h"

#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "comm/group/group_impl.h"
#include "deferred/deferred_init.h"
#include "engine/module_units.h"
#include "engine/names.h"
#include "engine/plain_params.h"
#include "engine/schedule.h"
#include "engine/unit.h"
#include "transfer/state_settings.h"

namespace tessera::fsdp {
namespace {

using engine::NamedParam;
using engine::Schedule;
using engine::Unit;

/// A unit to be made: its module and the parameters that it will take.
struct Plan {
  torch::nn::Module* module = nullptr;
  std::string name; // below the module that was asked for; empty: itself
  std::vector<NamedParam> params;
};

/// Where a parameter is, or will be.
at::Device place_of(const at::Tensor& tensor) {
  return is_deferred(tensor) ? engine::intended_device(tensor)
                             : tensor.device();
}

std::string describe(const NamedParam& param) {
  const at::Tensor& tensor = param.tensor;
  return fmt::format(
      "parameter \"{}\" {} [{}] on {}{}",
      param.name,
      c10::toString(tensor.scalar_type()),
      fmt::join(tensor.sizes(), ", "),
      place_of(tensor).type() == at::kCPU ? "the CPU" : "a device",
      tensor.requires_grad() ? "" : ", frozen");
}

/// Why a parameter cannot be sharded, if so; ranks may differ.
std::optional<std::string> objection_to(
    const NamedParam& param,
    const NamedParam& first,
    const ShardRequest& request) {
  const at::Tensor& tensor = param.tensor;
  const auto because = [&](std::string_view what) {
    return fmt::format("parameter \"{}\": {}", param.name, what);
  };
  if (tensor.is_meta() && !is_deferred(tensor)) {
    return because(
        "still on the meta device. Give it memory and values first, or build the model under tessera::DeferredInit.");
  }
  if (!tensor.is_floating_point() && !tensor.is_complex()) {
    return because(fmt::format(
        "{} cannot have gradients. Register it as a buffer, or name it in ignored_params.",
        c10::toString(tensor.scalar_type())));
  }
  if (place_of(tensor) != place_of(first.tensor)) {
    return because(fmt::format(
        "on {}, while the unit's first parameter is on {}. Move the module to one device first.",
        place_of(tensor).str(),
        place_of(first.tensor).str()));
  }
  if (engine::is_averaged(tensor)) {
    return because(
        "a DistributedDataParallel averages its gradients. Use one of them: let the handle go before sharding.");
  }
  if (!tensor.is_leaf()) {
    return because(
        "computed by other operators, not a leaf. Register plain tensors as parameters.");
  }
  if (request.uniform && tensor.scalar_type() != first.tensor.scalar_type()) {
    return because(fmt::format(
        "{}, while the unit's first parameter is {}. Must flatten tensors with uniform dtype: give the modules units of their own, or use fully_shard, which takes both.",
        c10::toString(tensor.scalar_type()),
        c10::toString(first.tensor.scalar_type())));
  }
  if (request.uniform && request.unit.one_leaf &&
      tensor.requires_grad() != first.tensor.requires_grad()) {
    return because(
        "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`. Use use_orig_params(true), or give frozen modules units of their own.");
  }
  return std::nullopt;
}

/// For each parameter the modules that register it.
using Registrars =
    std::unordered_map<const c10::TensorImpl*, std::vector<const void*>>;

Registrars registrars_in(const torch::nn::Module& root) {
  Registrars result;
  const auto visit = [&](const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      result[item.value().unsafeGetTensorImpl()].push_back(&module);
    }
  };
  visit(root);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    visit(*item.value());
  }
  return result;
}

std::unordered_set<const void*> modules_in(const torch::nn::Module& root) {
  std::unordered_set<const void*> result{&root};
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    result.insert(item.value().get());
  }
  return result;
}

/// Walks the tree bottom-up, as the policy says.
class Planner {
 public:
  Planner(torch::nn::Module& root, const ShardRequest& request)
      : root_(root), request_(request), registrars_(registrars_in(root)) {}

  std::vector<Plan> plan() && {
    if (request_.policy) {
      for (const auto& child : root_.named_children()) {
        descend(*child.value(), child.key());
      }
    }
    add(root_, "");
    return std::move(plans_);
  }

 private:
  bool is_free(const at::Tensor& tensor) const {
    const auto* impl = tensor.unsafeGetTensorImpl();
    return !request_.ignored_params.contains(impl) && !taken_.contains(impl) &&
        engine::unit_of(tensor) == nullptr;
  }

  int64_t free_numel(const torch::nn::Module& module) const {
    int64_t numel = 0;
    for (const NamedParam& param : engine::distinct_parameters(module)) {
      numel += is_free(param.tensor) ? param.tensor.numel() : 0;
    }
    return numel;
  }

  void descend(torch::nn::Module& module, const std::string& name) {
    if (request_.ignored_modules.contains(&module) ||
        !visited_.insert(&module).second) {
      return;
    }
    const WrapPolicy& policy = *request_.policy;
    if (policy.descends && !policy.descends(module, free_numel(module))) {
      return;
    }
    for (const auto& child : module.named_children()) {
      descend(*child.value(), name + "." + child.key());
    }
    if (policy.wraps(module, free_numel(module)) &&
        engine::unit_at(module) == nullptr) {
      add(module, name);
    }
  }

  /// Takes the parameters of the module that no unit has yet, except those that
  /// a module outside also registers: tied parameters go to a unit that
  /// contains all modules that use them.
  void add(torch::nn::Module& module, const std::string& name) {
    const auto inside = modules_in(module);
    Plan plan{&module, name, {}};
    for (NamedParam& param : engine::distinct_parameters(module)) {
      const auto& users = registrars_.at(param.tensor.unsafeGetTensorImpl());
      const bool is_inside =
          std::all_of(users.begin(), users.end(), [&](const void* user) {
            return inside.contains(user);
          });
      if (is_inside && is_free(param.tensor)) {
        taken_.insert(param.tensor.unsafeGetTensorImpl());
        plan.params.push_back(std::move(param));
      }
    }
    plans_.push_back(std::move(plan));
  }

  torch::nn::Module& root_;
  const ShardRequest& request_;
  const Registrars registrars_;
  std::unordered_set<const c10::TensorImpl*> taken_;
  std::unordered_set<const torch::nn::Module*> visited_;
  std::vector<Plan> plans_;
};

/// Counts a group's units; equal on all ranks, because the calls are. A
/// schedule cannot count them: it is destroyed with its last unit, at a time
/// that differs between ranks.
int next_unit_number(const Group& group) {
  struct Count {
    std::weak_ptr<comm::GroupImpl> group;
    int number = 0;
  };
  static auto& counts = *new std::map<const comm::GroupImpl*, Count>;
  static auto& mutex = *new std::mutex;
  const std::scoped_lock lock(mutex);
  std::erase_if(
      counts, [](const auto& entry) { return entry.second.group.expired(); });
  Count& count = counts[&group.impl()];
  count.group = group.impl().weak_from_this();
  return count.number++;
}

/// Why this rank cannot carry out the plans, if so.
std::optional<std::string> objection_to(
    const std::vector<Plan>& plans,
    const torch::nn::Module& module,
    const ShardRequest& request) {
  for (const auto& unit : engine::units_in(module)) {
    if (unit->home() == &module) {
      return "this module is sharded already. Call it once for each module, inner ones first.";
    }
  }
  for (const Plan& plan : plans) {
    for (const NamedParam& param : plan.params) {
      if (auto objection = objection_to(param, plan.params.front(), request)) {
        return objection;
      }
    }
  }
  return std::nullopt;
}

/// Whether the unit belongs to a module around this one, as far as names tell.
bool is_around(const Unit& unit, const torch::nn::Module& module) {
  const auto home = unit.lock_home();
  return home == nullptr ||
      modules_in(*static_cast<const torch::nn::Module*>(home.get()))
          .contains(&module);
}

/// Whether units around the module have all of its parameters. (Parameters of
/// units beside the module are tied.)
std::optional<std::string> taken_from_outside(const torch::nn::Module& module) {
  const auto inside = modules_in(module);
  const auto params = engine::distinct_parameters(module);
  const bool is_all_taken = !params.empty() &&
      std::all_of(params.begin(), params.end(), [&](const NamedParam& param) {
        const Unit* unit = engine::unit_of(param.tensor);
        return unit != nullptr && !inside.contains(unit->home()) &&
            is_around(*unit, module);
      });
  if (!is_all_taken) {
    return std::nullopt;
  }
  return fmt::format(
      "its parameters are sharded already, as part of \"{}\". Shard inner modules first, then those that contain them.",
      engine::unit_of(params.front().tensor)->name());
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
  const Group& all = request.groups.all;
  const auto plans = Planner(module, request).plan();

  std::vector<std::string> items{
      fmt::format("module {}", module.name()), request.description};
  for (const Plan& plan : plans) {
    items.push_back(fmt::format("unit \"{}\"", plan.name));
    for (const NamedParam& param : plan.params) {
      items.push_back(describe(param));
    }
  }
  agree(all, request.call, items);
  auto objection = objection_to(plans, module, request);
  if (!objection) {
    objection = taken_from_outside(module);
  }
  fail_together(all, request.call, objection);

  const auto schedule = Schedule::of(all);
  for (const Plan& plan : plans) {
    // A unit has its class's name until a larger module gives it a place.
    auto unit = schedule->add_unit(
        plan.module->name(),
        next_unit_number(all),
        plan.params,
        request.groups,
        request.unit);
    unit->set_home(plan.module, plan.module->weak_from_this());
    transfer::set_settings(
        *unit, StateDictSettings::of(request.state_dict_type));
    if (!unit->has_params()) {
      engine::remember(*plan.module, unit);
    }
    adopt(*plan.module, unit);
  }
  materialize(module); // buffers and ignored parameters
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
