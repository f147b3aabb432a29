#include "exported/frozen_mode.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <optional>
#include <string_view>

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

/// A number that may be written as an int.
double number_or_zero(const Node& node, std::string_view name) {
  const auto whole = find_argument<int64_t>(node, name);
  return whole ? static_cast<double>(*whole)
               : find_argument<double>(node, name).value_or(0);
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
  if (name == "_native_batch_norm_legit_no_training" ||
      name == "_batch_norm_no_update") {
    in_evaluation_.push_back(name);
    return;
  }
  // Attention has no other sign of the mode: without dropout it tells nothing.
  if (name.starts_with("_batch_norm_with_update") ||
      number_or_zero(node, "dropout_p") > 0) {
    in_training_.push_back(name);
    return;
  }
  // A dropout of nothing is the same in both modes.
  const bool is_dropout = name.find("dropout") != name.npos;
  const bool is_recurrent = name == "lstm" || name == "gru" ||
      name == "rnn_tanh" || name == "rnn_relu";
  if ((is_dropout || is_recurrent) &&
      number_or_zero(node, is_recurrent ? "dropout" : "p") == 0) {
    return;
  }
  if (find_argument<None>(node, "running_mean") ||
      node.target.ends_with(".no_stats")) {
    return; // a norm without statistics is the same in both modes
  }
  std::optional<bool> mode;
  for (const char* argument : {"train", "training", "use_input_stats"}) {
    mode = mode ? mode : find_argument<bool>(node, argument);
  }
  if (!mode && (name == "native_dropout" || name == "_fused_dropout")) {
    mode = true; // which None means
  }
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
