#include "fsdp/unit_plan.h"

#include <c10/core/ScalarType.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "deferred/replay.h"
#include "engine/module_units.h"
#include "engine/unit.h"

namespace tessera::fsdp {
namespace {

using engine::NamedParam;

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

/// Walks the tree bottom-up, as the policy says.
class UnitPlanner {
 public:
  UnitPlanner(torch::nn::Module& root, const ShardRequest& request)
      : root_(root), request_(request), registrars_(registrars_in(root)) {}

  std::vector<UnitPlan> plan() && {
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
    UnitPlan plan{&module, name, {}};
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
  std::vector<UnitPlan> plans_;
};

std::string line_of(const NamedParam& param) {
  const at::Tensor& tensor = param.tensor;
  return fmt::format(
      "parameter \"{}\" {} [{}] on {}{}",
      param.name,
      c10::toString(tensor.scalar_type()),
      fmt::join(tensor.sizes(), ", "),
      place_of(tensor).type() == at::kCPU ? "the CPU" : "a device",
      tensor.requires_grad() ? "" : ", frozen");
}

} // namespace

std::vector<UnitPlan> plan_units(
    torch::nn::Module& module,
    const ShardRequest& request) {
  return UnitPlanner(module, request).plan();
}

std::unordered_set<const void*> modules_in(const torch::nn::Module& root) {
  std::unordered_set<const void*> result{&root};
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    result.insert(item.value().get());
  }
  return result;
}

std::vector<std::string> describe(const std::vector<UnitPlan>& plans) {
  std::vector<std::string> lines;
  for (const UnitPlan& plan : plans) {
    lines.push_back(fmt::format("unit \"{}\"", plan.name));
    for (const NamedParam& param : plan.params) {
      lines.push_back(line_of(param));
    }
  }
  return lines;
}

at::Device place_of(const at::Tensor& param) {
  return is_deferred(param) ? deferred::intended_device(param) : param.device();
}

} // namespace tessera::fsdp
