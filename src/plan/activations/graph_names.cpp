#include "plan/activations/graph_names.h"

#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include "checkpoint/format/format_error.h"
#include "plan/activations/operator_call.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

using exported::Argument;
using exported::Node;
using exported::TensorName;

void append(std::vector<std::string>& names, const Argument& argument) {
  for (std::string& name : tensor_names(argument)) {
    names.push_back(std::move(name));
  }
}

/// The frame of the outermost of these modules that the node belongs to.
const exported::ModuleFrame* frame_of(
    const Node& node,
    const std::set<std::string>& modules) {
  for (const exported::ModuleFrame& frame : node.modules) {
    if (modules.contains(frame.path)) {
      return &frame;
    }
  }
  return nullptr;
}

} // namespace

std::vector<std::string> tensor_names(const Argument& argument) {
  std::vector<std::string> names;
  const auto add = [&](const auto& list) {
    for (const auto& each : list) {
      if constexpr (std::is_same_v<
                        std::decay_t<decltype(each)>,
                        std::optional<TensorName>>) {
        if (each) {
          names.push_back(each->name);
        }
      } else {
        names.push_back(each.name);
      }
    }
  };
  if (const auto* one = std::get_if<TensorName>(&argument.value)) {
    names.push_back(one->name);
  } else if (
      const auto* perhaps =
          std::get_if<std::optional<TensorName>>(&argument.value)) {
    if (*perhaps) {
      names.push_back((*perhaps)->name);
    }
  } else if (
      const auto* list =
          std::get_if<std::vector<TensorName>>(&argument.value)) {
    add(*list);
  } else if (
      const auto* some = std::get_if<std::vector<std::optional<TensorName>>>(
          &argument.value)) {
    add(*some);
  }
  return names;
}

std::vector<std::string> names_read(const Node& node) {
  std::vector<std::string> names;
  for (const exported::NamedArgument& input : node.inputs) {
    append(names, input.argument);
  }
  return names;
}

std::vector<std::string> names_given(const Node& node) {
  std::vector<std::string> names;
  for (const Argument& output : node.outputs) {
    append(names, output);
  }
  return names;
}

LastReads last_reads(const exported::Graph& graph) {
  LastReads last;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (std::string& name : names_read(graph.nodes[i])) {
      last[std::move(name)] = i;
    }
  }
  for (const Argument& output : graph.outputs) {
    for (std::string& name : tensor_names(output)) {
      last[std::move(name)] = graph.nodes.size();
    }
  }
  return last;
}

bool writes_in_place(std::string_view operator_name) {
  return operator_name.ends_with('_') && !operator_name.ends_with("__");
}

std::set<std::string> names_changed(const exported::Graph& graph) {
  std::set<std::string> names;
  for (const Node& node : graph.nodes) {
    const bool in_place = writes_in_place(OperatorCall::name_of(node));
    bool is_first = true;
    for (const exported::NamedArgument& input : node.inputs) {
      const bool is_statistic =
          input.name == "running_mean" || input.name == "running_var";
      for (std::string& name : tensor_names(input.argument)) {
        if (is_statistic || (in_place && is_first)) {
          names.insert(std::move(name));
        }
      }
      is_first = false;
    }
  }
  return names;
}

std::vector<CallRange> calls_of(
    const exported::Graph& graph,
    const std::set<std::string>& modules) {
  std::vector<CallRange> calls;
  std::set<std::pair<std::string, int64_t>> seen;
  const exported::ModuleFrame* last = nullptr; // of the node before
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    const auto* frame = frame_of(node, modules);
    if (frame == nullptr) {
      // A node without a place (a check of a size) does not end a call.
      last = node.modules.empty() ? last : nullptr;
    } else if (
        last != nullptr && last->path == frame->path &&
        last->call == frame->call) {
      calls.back().end = i + 1;
    } else if (!seen.emplace(frame->path, frame->call).second) {
      throw PlanError(
          "--recompute: the nodes of module " + format::in_quotes(frame->path) +
          " do not follow one another, so that it cannot be recomputed.");
    } else {
      calls.push_back({.path = frame->path, .begin = i, .end = i + 1});
    }
    last = frame != nullptr ? frame : last;
  }
  return calls;
}

} // namespace tessera::plan
