#include <tessera/engine/parameters.h>

#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "engine/list_parameters.h"
#include "engine/module_units.h"
#include "engine/names.h"
#include "engine/schedule.h"
#include "engine/unit.h"

namespace tessera {
namespace {

using engine::Unit;
using Visit = std::function<
    void(torch::nn::Module& module, const std::string& dotted_prefix)>;

/// Visits each module once, in pre-order, with its clean name and a dot.
void walk(
    torch::nn::Module& module,
    const std::string& prefix,
    bool recurse,
    const Visit& visit) {
  std::unordered_set<const torch::nn::Module*> seen;
  const auto dotted = [&](const std::string& name) {
    const std::string clean = engine::clean_name(name);
    const std::string full = prefix.empty() ? clean
        : clean.empty()                     ? prefix
                                            : prefix + "." + clean;
    return full.empty() ? full : full + ".";
  };
  seen.insert(&module);
  visit(module, dotted(""));
  if (recurse) {
    for (const auto& item : module.named_modules("", /*include_self=*/false)) {
      if (seen.insert(item.value().get()).second) {
        visit(*item.value(), dotted(item.key()));
      }
    }
  }
}

/// Has parameters that are not sharded, in a model with units, compared between
/// the ranks.
void watch_plain(torch::nn::Module& module) {
  const auto units = engine::units_in(module);
  if (units.empty()) {
    return;
  }
  for (const auto& param : engine::distinct_parameters(module)) {
    if (param.tensor.requires_grad() && !engine::is_sharded(param.tensor)) {
      units.front()->schedule().check().plain().add(
          module.name() + "." + param.name, param.tensor);
    }
  }
}

} // namespace

NamedTensors engine::list_parameters(
    torch::nn::Module& module,
    const std::string& prefix,
    bool recurse) {
  std::unordered_map<const void*, const Unit*> flat; // by their modules
  for (const auto& unit : engine::units_in(module)) {
    if (unit->options().one_leaf && !unit->bundles().empty() &&
        !unit->shows_summoned()) {
      flat[unit->home()] = unit.get();
    }
  }
  NamedTensors result;
  std::unordered_set<const c10::TensorImpl*> seen;
  walk(
      module,
      prefix,
      recurse,
      [&](torch::nn::Module& one, const std::string& path) {
        if (const auto home = flat.find(&one); home != flat.end()) {
          result.emplace_back(
              path + "_flat_param", home->second->params().leaves().front());
        }
        for (const auto& item : one.named_parameters(/*recurse=*/false)) {
          const at::Tensor& tensor = item.value();
          if (!seen.insert(tensor.unsafeGetTensorImpl()).second) {
            continue;
          }
          const Unit* unit = engine::unit_of(tensor);
          if (unit == nullptr || unit->shows_summoned()) {
            result.emplace_back(path + item.key(), tensor);
          } else if (!unit->options().one_leaf) {
            result.emplace_back(
                path + item.key(),
                unit->params().leaf_of(tensor.unsafeGetTensorImpl()));
          }
        }
      });
  return result;
}

NamedTensors named_parameters(
    ModuleRef module,
    const std::string& prefix,
    bool recurse) {
  watch_plain(module);
  return engine::list_parameters(module, prefix, recurse);
}

NamedTensors named_buffers(
    ModuleRef module,
    const std::string& prefix,
    bool recurse) {
  NamedTensors result;
  std::unordered_set<const c10::TensorImpl*> seen;
  walk(
      module,
      prefix,
      recurse,
      [&](torch::nn::Module& one, const std::string& path) {
        for (const auto& item : one.named_buffers(/*recurse=*/false)) {
          if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
            result.emplace_back(path + item.key(), item.value());
          }
        }
      });
  return result;
}

std::vector<at::Tensor> parameters(ModuleRef module) {
  std::vector<at::Tensor> result;
  for (auto& [name, tensor] : named_parameters(module)) {
    result.push_back(std::move(tensor));
  }
  return result;
}

void set_requires_grad(const at::Tensor& parameter, bool on) {
  if (Unit* unit = engine::unit_of(parameter)) {
    unit->params().set_requires_grad(parameter.unsafeGetTensorImpl(), on);
    return;
  }
  parameter.set_requires_grad(on);
  if (!on) {
    parameter.mutable_grad().reset();
  }
}

} // namespace tessera
