#include "exported/frozen_mode.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <optional>

namespace tessera::exported {
namespace {

template <class T>
std::optional<T> find_argument(const Node& node, std::string_view name) {
  for (const NamedArgument& input : node.inputs) {
    if (input.name == name) {
      if (const T* value = std::get_if<T>(&input.argument.value)) {
        return *value;
      }
    }
  }
  return std::nullopt;
}

/// aten::dropout, of "torch.ops.aten.dropout.default".
std::string short_name(const std::string& target) {
  const size_t last = target.rfind('.');
  const size_t first = target.rfind('.', last - 1);
  return target.substr(first + 1, last - first - 1);
}

} // namespace

FrozenMode::FrozenMode(const Program& program) {
  read(program.graph);
}

void FrozenMode::read(const Graph& graph) {
  for (const Node& node : graph.nodes) {
    read(node);
    for (const NamedArgument& input : node.inputs) {
      const auto* nested = std::get_if<NestedGraph>(&input.argument.value);
      if (nested != nullptr && nested->graph != nullptr) {
        read(*nested->graph);
      }
    }
  }
}

void FrozenMode::read(const Node& node) {
  if (!node.target.starts_with("torch.ops.aten.")) {
    return;
  }
  const std::string name = short_name(node.target);
  if (name == "_native_batch_norm_legit_no_training") {
    in_evaluation_.push_back(name);
    return;
  }
  if (name == "scaled_dot_product_attention") {
    if (find_argument<double>(node, "dropout_p").value_or(0) > 0) {
      in_training_.push_back(name);
    }
    return;
  }
  // A dropout of nothing is the same in both modes.
  const bool is_dropout = name.find("dropout") != name.npos;
  const bool is_recurrent = name == "lstm" || name == "gru" ||
      name == "rnn_tanh" || name == "rnn_relu";
  const auto p = find_argument<double>(node, is_recurrent ? "dropout" : "p");
  const auto whole = find_argument<int64_t>(node, "p");
  if ((is_dropout || is_recurrent) && p.value_or(0) == 0 &&
      whole.value_or(0) == 0) {
    return;
  }
  if (find_argument<None>(node, "running_mean")) {
    return; // batch norm without statistics is the same in both modes
  }
  auto mode = find_argument<bool>(node, "train");
  mode = mode ? mode : find_argument<bool>(node, "training");
  if (mode) {
    (*mode ? in_training_ : in_evaluation_).push_back(name);
  }
}

std::string FrozenMode::operators(bool is_training) const {
  std::map<std::string, int> counts;
  for (const auto& name : is_training ? in_training_ : in_evaluation_) {
    ++counts[name];
  }
  std::vector<std::string> texts;
  for (const auto& [name, count] : counts) {
    texts.push_back(
        count == 1 ? name : fmt::format("{} ({} times)", name, count));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

} // namespace tessera::exported
