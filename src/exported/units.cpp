#include <tessera/error.h>
#include <tessera/exported/units.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <regex>
#include <set>
#include <utility>

namespace tessera {
namespace {

bool is_number(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
}

/// The children are blocks of one kind: numbered, and of one class.
bool has_blocks(const ExportedModule& module) {
  const auto children = module.named_children();
  if (children.size() < 2) {
    return false;
  }
  std::string class_name;
  for (const auto& child : children) {
    const auto* block =
        dynamic_cast<const ExportedModule*>(child.value().get());
    if (block == nullptr || !is_number(child.key()) ||
        block->parameters().empty() || block->class_name().empty() ||
        (!class_name.empty() && class_name != block->class_name())) {
      return false;
    }
    class_name = block->class_name();
  }
  return true;
}

void add_blocks(const ExportedModule& module, std::vector<std::string>& paths) {
  const bool are_blocks = has_blocks(module);
  for (const auto& child : module.children()) {
    const auto* part = dynamic_cast<const ExportedModule*>(child.get());
    if (part != nullptr && are_blocks) {
      paths.push_back(part->path());
    } else if (part != nullptr) {
      add_blocks(*part, paths);
    }
  }
}

} // namespace

ModuleChoice choose_by_path(const std::string& expression) {
  std::shared_ptr<const std::regex> pattern;
  try {
    pattern = std::make_shared<const std::regex>(expression);
  } catch (const std::regex_error& error) {
    raise<c10::ValueError>(
        {.call = "choose_by_path"},
        fmt::format(
            "\"{}\" is not a regular expression: {}.",
            expression,
            error.what()));
  }
  return [pattern](const torch::nn::Module& module) {
    const auto* part = dynamic_cast<const ExportedModule*>(&module);
    return part != nullptr && std::regex_match(part->path(), *pattern);
  };
}

ModuleChoice choose_by_class(std::vector<std::string> names) {
  return [names = std::move(names)](const torch::nn::Module& module) {
    const auto* part = dynamic_cast<const ExportedModule*>(&module);
    return part != nullptr &&
        std::any_of(names.begin(), names.end(), [&](const std::string& name) {
             return part->class_name() == name ||
                 part->class_name().ends_with("." + name);
           });
  };
}

std::vector<std::string> repeated_blocks(const Exported& model) {
  std::vector<std::string> paths;
  add_blocks(*model, paths);
  return paths;
}

WrapPolicy block_policy(const Exported& model) {
  const auto paths = repeated_blocks(model);
  if (paths.empty()) {
    TORCH_WARN(
        "block_policy: the model has no repeated blocks, so all of it becomes one unit, which is gathered at once. Choose units with choose_by_path or choose_by_class.");
  }
  return lambda_auto_wrap_policy(
      [chosen = std::set<std::string>(paths.begin(), paths.end())](
          const torch::nn::Module& module) {
        const auto* part = dynamic_cast<const ExportedModule*>(&module);
        return part != nullptr && chosen.contains(part->path());
      });
}

} // namespace tessera
