#include "exported/graph_compiler.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "exported/argument_use.h"
#include "exported/nested_steps.h"
#include "exported/node_text.h"
#include "exported/operator_name.h"
#include "exported/overloaded.h"
#include "exported/python_math.h"
#include "exported/steps.h"

namespace tessera::exported {
namespace {

constexpr std::string_view kHigherOrder = "torch.ops.higher_order.";

template <class T>
T literal(const Node& node, size_t index) {
  if (index < node.inputs.size()) {
    if (const T* value = std::get_if<T>(&node.inputs[index].argument.value)) {
      return *value;
    }
  }
  throw RefusedNode(fmt::format("has no fixed value as argument {}", index));
}

size_t num_values(const Operand& operand) {
  return operand.form < Operand::Form::Tensors ? 1 : operand.elements.size();
}

size_t num_values(std::span<const Operand> operands) {
  size_t result = 0;
  for (const Operand& operand : operands) {
    result += num_values(operand);
  }
  return result;
}

void expect_fit(bool fits) {
  if (!fits) {
    throw RefusedNode("does not fit its graphs");
  }
}

/// Sets what a loop carries; throws unless the values that a node gives its
/// graphs are as many as the graphs take.
void check_nested(const Node& node, NestedStep& step) {
  const std::span<const Operand> operands = step.operands;
  const size_t num_inputs = num_values(operands);
  const size_t first_inputs = step.first.inputs.size();
  if (dynamic_cast<CondStep*>(&step) != nullptr) {
    expect_fit(
        num_inputs == first_inputs + 1 &&
        first_inputs == step.second.inputs.size() &&
        step.first.outputs.size() == step.second.outputs.size());
    return;
  }
  expect_fit(num_inputs == first_inputs);
  if (auto* loop = dynamic_cast<WhileStep*>(&step)) {
    expect_fit(!operands.empty() && num_inputs == step.second.inputs.size());
    loop->num_carried = num_values(operands[0]);
    expect_fit(
        step.first.outputs.size() == 1 &&
        step.second.outputs.size() == loop->num_carried);
  } else if (auto* scan = dynamic_cast<ScanStep*>(&step)) {
    const size_t rows = node.target.ends_with("scan") ? 1 : 0;
    expect_fit(operands.size() > rows);
    scan->num_carried = rows == 0 ? 0 : num_values(operands[0]);
    scan->num_rows = num_values(operands[rows]);
    expect_fit(
        scan->num_rows > 0 && step.first.outputs.size() >= scan->num_carried);
  }
}

} // namespace

GraphCompiler::GraphCompiler(
    const Graph& graph,
    const Placement& placement,
    Refusals& refusals)
    : graph_(graph),
      placement_(placement),
      refusals_(refusals),
      arguments_(code_, placement) {}

void GraphCompiler::define(const std::string& name, Source source) {
  arguments_.define(name, source);
}

int32_t GraphCompiler::new_slot(const std::string& name) {
  const auto slot = static_cast<int32_t>(code_.num_slots++);
  arguments_.define(name, {Source::From::Slot, static_cast<uint32_t>(slot)});
  return slot;
}

void GraphCompiler::skip_input() {
  code_.inputs.push_back(Result::kDropped);
}

void GraphCompiler::add_input(const Argument& argument) {
  const Result result = result_of(argument);
  code_.inputs.push_back(
      result.slots.size() == 1 ? result.slots.front() : Result::kDropped);
}

Result GraphCompiler::result_of(const Argument& output) {
  Result result;
  const auto add = Overloaded{
      [&](const TensorName& tensor) {
        result.slots.push_back(new_slot(tensor.name));
      },
      [&](const std::optional<TensorName>& tensor) {
        result.slots.push_back(
            tensor ? new_slot(tensor->name) : Result::kDropped);
      },
      [&]<class Number>(const Symbolic<Number>& number) {
        const auto* name = std::get_if<std::string>(&number.value);
        result.slots.push_back(
            name != nullptr ? new_slot(*name) : Result::kDropped);
      },
      [&](const auto&) { result.slots.push_back(Result::kDropped); }};
  std::visit(
      Overloaded{
          [&]<class Element>(const std::vector<Element>& elements) {
            result.is_list = true;
            for (const Element& element : elements) {
              add(element);
            }
          },
          add},
      output.value);
  return result;
}

Code GraphCompiler::compile() {
  for (const Node& node : graph_.nodes) {
    try {
      add_node(node);
    } catch (const RefusedNode& refused) {
      refusals_.others.insert(fmt::format(
          "{} {}, which is not supported ({}).",
          node.target,
          refused.what(),
          describe_node(node)));
      for (const Argument& output : node.outputs) {
        result_of(output); // later nodes may read it
      }
    }
  }
  try {
    for (const Argument& output : graph_.outputs) {
      if (is_list(output)) {
        throw RefusedNode("gives a list in place of single values");
      }
      code_.outputs.push_back(arguments_.operand(output));
    }
  } catch (const RefusedNode& refused) {
    refusals_.others.insert(
        fmt::format("the end of a graph {}.", refused.what()));
  }
  mark_last_uses(code_);
  return std::move(code_);
}

void GraphCompiler::add_node(const Node& node) {
  auto step = make_step(node);
  if (step == nullptr) {
    for (const Argument& output : node.outputs) {
      result_of(output);
    }
    return;
  }
  step->node = &node;
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    step->results.push_back(result_of(node.outputs[i]));
    // A later call of a module names what an earlier one wrote by the result
    // of that write: it is still the buffer.
    const auto* name = std::get_if<TensorName>(&node.outputs[i].value);
    const auto weight = weight_written_to(*step, i);
    if (name != nullptr && weight) {
      arguments_.define(name->name, *weight);
    }
  }
  code_.steps.push_back(std::move(step));
}

/// Null if the operator is missing, which is noted.
std::unique_ptr<Step> GraphCompiler::make_step(const Node& node) {
  if (node.target.starts_with(kHigherOrder)) {
    return make_nested(node);
  }
  if (find_node_function(node.target) != nullptr) {
    return make_function(node);
  }
  return make_operator(node);
}

std::unique_ptr<Step> GraphCompiler::make_function(const Node& node) {
  auto step = std::make_unique<FunctionStep>(find_node_function(node.target));
  for (const NamedArgument& input : node.inputs) {
    step->operands.push_back(arguments_.operand(input.argument));
  }
  if (node.outputs.size() != 1 ||
      step->operands.size() < num_operands(node.target)) {
    throw RefusedNode("has another number of arguments or results");
  }
  return step;
}

std::unique_ptr<Step> GraphCompiler::make_operator(const Node& node) {
  if (!may_be_called(node.target)) {
    throw RefusedNode(
        "is an operator that no model may call: it opens files, sends to other ranks or looks at memory by address");
  }
  const auto op = find_operator(node.target);
  if (!op) {
    refusals_.missing.insert(operator_text(node.target));
    return nullptr;
  }
  auto step = std::make_unique<OperatorStep>(*op);
  const c10::FunctionSchema& schema = op->schema();
  const ArgumentUse use(schema, node);
  const bool drops_dtype = placement_.dtype &&
      node.target == "torch.ops.aten._assert_tensor_metadata.default";
  size_t used = 0;
  for (const c10::Argument& formal : schema.arguments()) {
    const NamedArgument* given = nullptr;
    for (const NamedArgument& input : node.inputs) {
      if (input.name == formal.name()) {
        given = &input;
        ++used;
      }
    }
    if (drops_dtype && formal.name() == "dtype") {
      given = nullptr;
    }
    if (given == nullptr && !formal.default_value()) {
      throw RefusedNode("lacks the argument \"" + formal.name() + "\"");
    }
    if (formal.alias_info() != nullptr) {
      step->shared.push_back(step->operands.size());
    }
    if (use.is_written(formal)) {
      step->written.push_back(step->operands.size());
    }
    if (use.is_unread(formal)) {
      step->unread.push_back(step->operands.size());
    }
    step->operands.push_back(
        given != nullptr
            ? arguments_.operand(given->argument, formal)
            : Operand{
                  .form = Operand::Form::Value,
                  .source = arguments_.constant(*formal.default_value()),
                  .elements = {}});
  }
  if (used < node.inputs.size()) {
    throw RefusedNode("has an argument that this LibTorch's operator lacks");
  }
  if (!node.outputs.empty() && node.outputs.size() != schema.returns().size()) {
    throw RefusedNode("gives another number of results in this LibTorch");
  }
  return step;
}

Code GraphCompiler::nested_code(const Argument& argument) {
  const auto* nested = std::get_if<NestedGraph>(&argument.value);
  if (nested == nullptr || nested->graph == nullptr) {
    throw RefusedNode("lacks a graph");
  }
  GraphCompiler compiler(*nested->graph, placement_, refusals_);
  for (const Argument& input : nested->graph->inputs) {
    compiler.add_input(input);
  }
  return compiler.compile();
}

std::unique_ptr<Step> GraphCompiler::make_nested(const Node& node) {
  const std::string name = node.target.substr(kHigherOrder.size());
  const auto graph_at = [&](size_t index) {
    if (index >= node.inputs.size()) {
      throw RefusedNode("lacks a graph");
    }
    return nested_code(node.inputs[index].argument);
  };
  std::unique_ptr<NestedStep> step;
  size_t first_operand = 0;
  if (name == "wrap_with_set_grad_enabled") {
    auto made = std::make_unique<GradModeStep>();
    made->enabled = literal<bool>(node, 0);
    made->first = graph_at(1);
    first_operand = 2;
    step = std::move(made);
  } else if (name == "wrap_with_autocast") {
    auto made = std::make_unique<AutocastStep>();
    made->type = placement_.map({literal<std::string>(node, 0), {}}).type();
    made->enabled = literal<bool>(node, 2);
    const Argument& dtype = node.inputs[1].argument;
    if (const auto* given = std::get_if<DType>(&dtype.value)) {
      made->dtype = to_scalar_type(*given);
    }
    // The device's default is to cache.
    made->caches = node.inputs.size() <= 3 ||
        !std::holds_alternative<bool>(node.inputs[3].argument.value) ||
        literal<bool>(node, 3);
    made->first = graph_at(4);
    first_operand = 5;
    step = std::move(made);
  } else if (name == "cond") {
    step = std::make_unique<CondStep>();
    step->first = graph_at(1);
    step->second = graph_at(2);
    step->operands.push_back(arguments_.operand(node.inputs[0].argument));
    first_operand = 3;
  } else if (name == "while_loop") {
    step = std::make_unique<WhileStep>();
    step->first = graph_at(0);
    step->second = graph_at(1);
    first_operand = 2;
  } else if (name == "scan" || name == "map_impl") {
    step = std::make_unique<ScanStep>();
    step->first = graph_at(0);
    first_operand = 1;
  } else if (name == "strict_mode" || name == "wrap") {
    step = std::make_unique<PlainGraphStep>();
    step->first = graph_at(0);
    first_operand = 1;
  } else {
    throw RefusedNode("is a higher-order operator");
  }
  for (size_t i = first_operand; i < node.inputs.size(); ++i) {
    step->operands.push_back(arguments_.operand(node.inputs[i].argument));
  }
  check_nested(node, *step);
  return step;
}

} // namespace tessera::exported
