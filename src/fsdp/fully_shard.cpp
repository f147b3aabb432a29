#include <tessera/comm/agree.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "comm/group_impl.h"
#include "shard/schedule.h"
#include "shard/unit.h"

namespace tessera {
namespace {

using shard::NamedParam;
using shard::Schedule;
using shard::Unit;

/// All parameters of the module, pre-order, tied ones once under their first
/// name.
std::vector<NamedParam> distinct_parameters(const torch::nn::Module& module) {
  std::vector<NamedParam> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      result.push_back({item.key(), item.value()});
    }
  }
  return result;
}

std::vector<Unit*> units_of(const torch::nn::Module& module) {
  std::vector<Unit*> units;
  for (const NamedParam& param : distinct_parameters(module)) {
    Unit* unit = shard::unit_of(param.tensor);
    if (unit != nullptr &&
        std::find(units.begin(), units.end(), unit) == units.end()) {
      units.push_back(unit);
    }
  }
  return units;
}

std::string describe(const NamedParam& param) {
  const at::Tensor& tensor = param.tensor;
  return fmt::format(
      "parameter \"{}\" {} [{}] on {}{}",
      param.name,
      c10::toString(tensor.scalar_type()),
      fmt::join(tensor.sizes(), ", "),
      tensor.device().type() == at::kCPU ? "the CPU" : "a device",
      tensor.requires_grad() ? "" : ", frozen");
}

std::string describe(const FullyShardOptions& options) {
  const auto& policy = options.mp_policy();
  const auto name = [](const std::optional<at::ScalarType>& dtype) {
    return dtype ? c10::toString(*dtype) : "as it is";
  };
  return fmt::format(
      "layout {}, reshard_after_forward {}, param_dtype {}, reduce_dtype {}",
      options.layout() == ShardLayout::Flat ? "Flat" : "Dim0",
      options.reshard_after_forward(),
      name(policy.param_dtype()),
      name(policy.reduce_dtype()));
}

/// Of what only this rank may see: why a parameter cannot be sharded.
std::optional<std::string> objection_to(
    const NamedParam& param,
    const at::Device& device) {
  const at::Tensor& tensor = param.tensor;
  const auto because = [&](std::string_view what) {
    return fmt::format("parameter \"{}\": {}", param.name, what);
  };
  if (tensor.is_meta()) {
    return because(
        "still on the meta device. Give it memory and values before fully_shard.");
  }
  if (!tensor.is_floating_point() && !tensor.is_complex()) {
    return because(fmt::format(
        "{} cannot have gradients. Register it as a buffer, or name it in ignored_params.",
        c10::toString(tensor.scalar_type())));
  }
  if (tensor.device() != device) {
    return because(fmt::format(
        "on {}, while the unit's first parameter is on {}. Move the module to one device first.",
        tensor.device().str(),
        device.str()));
  }
  if (!tensor.is_leaf()) {
    return because(
        "computed by other operators, not a leaf. Register plain tensors as parameters.");
  }
  return std::nullopt;
}

/// A name that is the same on all ranks and tells units apart.
std::string provisional_name(const torch::nn::Module& module, int number) {
  return fmt::format("{}#{}", module.name(), number);
}

/// Units inside `module` get their place in it as a name; those without a
/// parent get this one.
void adopt(
    torch::nn::Module& module,
    const std::vector<Unit*>& inner,
    const std::shared_ptr<Unit>& parent) {
  for (Unit* unit : inner) {
    if (unit->is_root() && unit != parent.get()) {
      unit->set_parent(parent);
    }
  }
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    for (Unit* unit : inner) {
      if (unit->home() == item.value().get()) {
        unit->set_name(item.key());
      }
    }
  }
}

} // namespace

void fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  const Group group = options.group() ? *options.group() : world();
  std::vector<NamedParam> fresh;
  for (const NamedParam& param : distinct_parameters(module)) {
    const bool ignored = std::any_of(
        options.ignored_params().begin(),
        options.ignored_params().end(),
        [&](const at::Tensor& other) { return other.is_same(param.tensor); });
    if (!ignored && shard::unit_of(param.tensor) == nullptr) {
      fresh.push_back(param);
    }
  }
  const auto inner = units_of(module);

  std::vector<std::string> items{
      fmt::format("module {}", module.name()), describe(options)};
  for (const NamedParam& param : fresh) {
    items.push_back(describe(param));
  }
  agree(group, "fully_shard", items);

  std::optional<std::string> objection;
  for (const NamedParam& param : fresh) {
    if (!objection) {
      objection = objection_to(param, fresh.front().tensor.device());
    }
  }
  const bool is_repeated =
      std::any_of(inner.begin(), inner.end(), [&](const Unit* unit) {
        return unit->home() == &module;
      });
  if (is_repeated) {
    objection =
        "this module is sharded already. Call fully_shard once for each module, inner ones first.";
  }
  fail_together(group, "fully_shard", objection);
  if (fresh.empty()) {
    return;
  }

  const auto schedule = Schedule::of(group);
  auto unit = Unit::create(
      provisional_name(module, schedule->next_unit_number()),
      fresh,
      group,
      {.layout = options.layout() == ShardLayout::Flat
           ? shard::Layout::Kind::Flat
           : shard::Layout::Kind::Dim0,
       .reshard_after_forward = options.reshard_after_forward(),
       .param_dtype = options.mp_policy().param_dtype(),
       .reduce_dtype = options.mp_policy().reduce_dtype()},
      schedule);
  unit->set_home(&module);
  adopt(module, inner, unit);
}

std::vector<std::pair<std::string, at::Tensor>> named_parameters(
    torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const NamedParam& param : distinct_parameters(module)) {
    const Unit* unit = shard::unit_of(param.tensor);
    result.emplace_back(
        param.name,
        unit == nullptr ? param.tensor
                        : unit->leaf_of(param.tensor.unsafeGetTensorImpl()));
  }
  return result;
}

std::vector<at::Tensor> parameters(torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (auto& [name, tensor] : named_parameters(module)) {
    result.push_back(std::move(tensor));
  }
  return result;
}

void unshard(torch::nn::Module& module) {
  for (Unit* unit : units_of(module)) {
    unit->schedule().gather(*unit);
  }
}

void reshard(torch::nn::Module& module) {
  for (Unit* unit : units_of(module)) {
    unit->reshard();
  }
}

void set_requires_gradient_sync(torch::nn::Module& module, bool on) {
  for (Unit* unit : units_of(module)) {
    unit->set_syncs_gradients(on);
  }
}

void recover(torch::nn::Module& module) {
  for (Unit* unit : units_of(module)) {
    unit->schedule().recover();
  }
}

namespace {

/// The gradients of one group's shards, or, without a group, of unsharded
/// parameters, which every rank has whole.
struct GroupGradients {
  Group group;
  std::vector<at::Tensor> gradients;
};

/// In the order in which the module comes to the groups: the same on all ranks.
std::vector<GroupGradients> gradients_of(torch::nn::Module& module) {
  std::vector<GroupGradients> result;
  for (const NamedParam& param : distinct_parameters(module)) {
    const Unit* unit = shard::unit_of(param.tensor);
    const Group group = unit == nullptr ? Group() : unit->group();
    auto entry =
        std::find_if(result.begin(), result.end(), [&](const auto& other) {
          return other.group.valid() == group.valid() &&
              (!group.valid() || &other.group.impl() == &group.impl());
        });
    if (entry == result.end()) { // also where this rank has no gradient
      entry = result.insert(result.end(), {group, {}});
    }
    const at::Tensor leaf = unit == nullptr
        ? param.tensor
        : unit->leaf_of(param.tensor.unsafeGetTensorImpl());
    if (leaf.grad().defined() && leaf.grad().numel() > 0) {
      entry->gradients.push_back(leaf.grad());
    }
  }
  return result;
}

/// Sum of |g|^p of the gradients, or their largest |g|, in double.
double local_power(const std::vector<at::Tensor>& gradients, double p) {
  const bool is_max = std::isinf(p);
  double total = 0;
  for (const at::Tensor& gradient : gradients) {
    const double norm =
        at::linalg_vector_norm(gradient, p, std::nullopt, false, at::kDouble)
            .item<double>();
    total = is_max ? std::max(total, norm) : total + std::pow(norm, p);
  }
  return total;
}

} // namespace

double clip_grad_norm_(
    torch::nn::Module& module,
    double max_norm,
    double norm_type) {
  at::NoGradGuard no_grad;
  const bool is_max = std::isinf(norm_type);
  double total = 0;
  auto by_group = gradients_of(module);
  for (auto& [group, gradients] : by_group) {
    auto power = at::full({1}, local_power(gradients, norm_type), at::kDouble);
    if (group.valid()) {
      group.all_reduce(
          power, is_max ? ReduceOp::Max : ReduceOp::Sum, "clip_grad_norm_");
    }
    const double part = power.item<double>();
    total = is_max ? std::max(total, part) : total + part;
  }
  const double norm = is_max ? total : std::pow(total, 1.0 / norm_type);
  const double scale = max_norm / (norm + 1e-6);
  if (scale < 1) {
    for (auto& [group, gradients] : by_group) {
      if (!gradients.empty()) {
        at::_foreach_mul_(gradients, scale);
      }
    }
  }
  return norm;
}

} // namespace tessera
