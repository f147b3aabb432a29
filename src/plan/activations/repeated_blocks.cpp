#include "plan/activations/repeated_blocks.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <variant>

#include "base/digits.h"

namespace tessera::plan {
namespace {

struct Module {
  std::string class_name;
  bool has_parameters = false;
  std::set<std::string> children; // paths
};
using Modules = std::map<std::string, Module>; // by path

/// Deeper paths are no person's: they would only cost time.
constexpr int64_t kDeepest = 64;

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == path.npos ? "" : path.substr(0, dot);
}

/// The module and all around it.
void add(Modules& modules, std::string path, bool has_parameters) {
  if (std::count(path.begin(), path.end(), '.') > kDeepest) {
    return;
  }
  while (true) {
    Module& module = modules[path];
    module.has_parameters = module.has_parameters || has_parameters;
    if (path.empty()) {
      return;
    }
    std::string parent = parent_of(path);
    modules[parent].children.insert(path);
    path = std::move(parent);
  }
}

void add_classes(const exported::Graph& graph, Modules& modules) {
  for (const exported::Node& node : graph.nodes) {
    for (const exported::ModuleFrame& frame : node.modules) {
      add(modules, frame.path, false);
      const auto module = modules.find(frame.path);
      if (module != modules.end() && module->second.class_name.empty()) {
        module->second.class_name = frame.class_name;
      }
    }
    for (const exported::NamedArgument& input : node.inputs) {
      const auto* nested =
          std::get_if<exported::NestedGraph>(&input.argument.value);
      if (nested != nullptr && nested->graph != nullptr) {
        add_classes(*nested->graph, modules);
      }
    }
  }
}

bool are_blocks(const Modules& modules, const Module& list) {
  const std::string* class_name = nullptr;
  for (const std::string& path : list.children) {
    const Module& child = modules.at(path);
    const std::string_view name =
        std::string_view(path).substr(path.rfind('.') + 1);
    if (!is_digits(name) || !child.has_parameters || child.class_name.empty() ||
        (class_name != nullptr && *class_name != child.class_name)) {
      return false;
    }
    class_name = &child.class_name;
  }
  return list.children.size() > 1;
}

void collect(
    const Modules& modules,
    const std::string& path,
    std::set<std::string>& blocks) {
  const Module& module = modules.at(path);
  if (are_blocks(modules, module)) {
    blocks.insert(module.children.begin(), module.children.end());
    return;
  }
  for (const std::string& child : module.children) {
    collect(modules, child, blocks);
  }
}

} // namespace

std::set<std::string> repeated_blocks(const exported::Program& program) {
  Modules modules;
  add(modules, "", false);
  for (const exported::InputSpec& input : program.inputs) {
    if (const auto* param = std::get_if<exported::ParameterInput>(&input)) {
      add(modules, parent_of(param->path), true);
    }
  }
  add_classes(program.graph, modules);
  std::set<std::string> blocks;
  collect(modules, "", blocks);
  return blocks;
}

} // namespace tessera::plan
