#include "plan/activations/graph_run.h"

#include <algorithm>
#include <array>
#include <utility>
#include <variant>

#include "plan/activations/operator_rules.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

using exported::Graph;
using exported::Node;

/// What is larger is not computed once; see exported/fold_constants.h.
constexpr int64_t kLargestConstant = int64_t{1} << 20;
constexpr std::string_view kHigherOrder = "torch.ops.higher_order.";

bool draws_numbers(std::string_view name) {
  constexpr std::array<std::string_view, 8> kWords{
      "rand",
      "bernoulli",
      "normal",
      "multinomial",
      "dropout",
      "poisson",
      "exponential",
      "uniform"};
  return std::any_of(kWords.begin(), kWords.end(), [&](std::string_view word) {
    return name.find(word) != name.npos;
  });
}

/// Whether an argument is computed from sizes.
bool depends_on_symbols(const exported::Argument& argument) {
  const auto is_name = [](const exported::SymbolicInt& number) {
    return std::holds_alternative<std::string>(number.value);
  };
  if (const auto* one = std::get_if<exported::SymbolicInt>(&argument.value)) {
    return is_name(*one);
  }
  const auto* list =
      std::get_if<std::vector<exported::SymbolicInt>>(&argument.value);
  return list != nullptr && std::any_of(list->begin(), list->end(), is_name);
}

} // namespace

TensorShape GraphRun::shape_at(const Graph& graph, const std::string& name)
    const {
  const auto meta = graph.tensors.find(name);
  if (meta == graph.tensors.end()) {
    throw exported::UnknownSize("the tensor " + name + " has no shape");
  }
  return sizes_.shape_of(meta->second);
}

void GraphRun::hold(Names& names, const std::string& name, ValueId value) {
  tape_.heap.retain(tape_.at(value).block);
  names.insert_or_assign(name, value);
}

void GraphRun::let_go(Names& names, const std::string& name) {
  if (const auto found = names.find(name); found != names.end()) {
    tape_.heap.release(tape_.at(found->second).block);
    names.erase(found);
  }
}

void GraphRun::let_go(Names& names) {
  for (const auto& [name, value] : names) {
    tape_.heap.release(tape_.at(value).block);
  }
  names.clear();
}

void GraphRun::run(
    const Graph& graph,
    size_t begin,
    size_t end,
    const LastReads& last,
    Names& names) {
  for (size_t i = begin; i < end; ++i) {
    run_node(graph, graph.nodes[i], names);
    std::vector<std::string> done = names_read(graph.nodes[i]);
    for (std::string& name : names_given(graph.nodes[i])) {
      done.push_back(std::move(name));
    }
    for (const std::string& name : done) {
      const auto read = last.find(name);
      if (read == last.end() || read->second <= i) {
        let_go(names, name);
      }
    }
  }
}

void GraphRun::run_node(const Graph& graph, const Node& node, Names& names) {
  if (node.target.starts_with(kHigherOrder) && run_nested(node, names)) {
    return;
  }
  const std::vector<std::string> given = names_given(node);
  if (given.empty()) {
    return;
  }
  std::vector<TensorShape> shapes;
  for (const std::string& name : given) {
    shapes.push_back(shape_at(graph, name));
  }
  if (is_constant(node, shapes, names)) {
    give_constants(graph, given, shapes, names);
    return;
  }
  count_constants(node, names);
  OperatorCall call(node, names, std::move(shapes), device_, tape_);
  const std::string_view name = OperatorCall::name_of(node);
  if (!apply_rule(name, call)) {
    apply_unknown(name, call);
  }
  if (writes_in_place(name)) {
    see_write(call, names);
  }
  for (size_t i = 0; i < given.size() && i < call.given().size(); ++i) {
    hold(names, given[i], call.given()[i]);
  }
}

/// Who reads the memory that an operator wrote in place reads its result: the
/// same tensor is the result, another one (that it was a view of) has a part
/// that is.
void GraphRun::see_write(const OperatorCall& call, Names& names) {
  if (call.tensors().empty() || call.given().empty() ||
      !tape_.needs_gradient(call.given().front())) {
    return;
  }
  const ValueId written = call.tensors().front();
  const ValueId result = call.given().front();
  for (auto& [name, value] : names) {
    if (tape_.at(value).block != tape_.at(result).block) {
      continue;
    }
    if (value == written) {
      value = result;
      continue;
    }
    Value whole = tape_.at(value);
    whole.needs_gradient = false; // until the node is recorded
    const ValueId changed = tape_.add(std::move(whole));
    tape_.record(
        {.results = {changed},
         .inputs = {{value, Flow::Pass}, {result, Flow::Make}},
         .saved = {},
         .temporary = tape_.at(changed).shape.bytes()});
    value = changed;
  }
}

/// Whether the node is computed before the first forward.
bool GraphRun::is_constant(
    const Node& node,
    const std::vector<TensorShape>& shapes,
    const Names& names) const {
  const std::string_view name = OperatorCall::name_of(node);
  if (draws_numbers(name) || writes_in_place(name)) {
    return false;
  }
  for (const exported::NamedArgument& input : node.inputs) {
    const bool is_computed =
        std::holds_alternative<exported::SymbolicInt>(input.argument.value) ||
        std::holds_alternative<std::vector<exported::SymbolicInt>>(
            input.argument.value);
    if (is_computed && depends_on_symbols(input.argument)) {
      return false;
    }
  }
  for (const std::string& read : names_read(node)) {
    const auto found = names.find(read);
    if (found == names.end() || !tape_.at(found->second).is_constant) {
      return false;
    }
  }
  return std::all_of(shapes.begin(), shapes.end(), [](const auto& shape) {
    return shape.bytes() <= kLargestConstant;
  });
}

void GraphRun::give_constants(
    const Graph& graph,
    const std::vector<std::string>& given,
    const std::vector<TensorShape>& shapes,
    Names& names) {
  for (size_t i = 0; i < given.size(); ++i) {
    const ValueId value = tape_.add(
        {.shape = shapes[i],
         .block = tape_.heap.outside(),
         .is_constant = true});
    computed_.emplace(value, std::pair(&graph, given[i]));
    hold(names, given[i], value);
  }
}

/// Constants stay if a node that is run reads them.
void GraphRun::count_constants(const Node& node, const Names& names) {
  for (const std::string& read : names_read(node)) {
    const auto found = names.find(read);
    const auto made =
        found == names.end() ? computed_.end() : computed_.find(found->second);
    if (made != computed_.end() && counted_.insert(made->second).second) {
      constant_bytes_ =
          plus(constant_bytes_, tape_.at(found->second).shape.bytes());
    }
  }
}

void GraphRun::apply_unknown(std::string_view name, OperatorCall& call) {
  GradNode node;
  for (const TensorShape& shape : call.shapes()) {
    node.results.push_back(call.make(shape));
    call.give(node.results.back());
  }
  node.saved = node.results;
  bool learns = false;
  for (const ValueId tensor : call.tensors()) {
    node.inputs.push_back({tensor, Flow::Make});
    learns = learns || call.needs_gradient(tensor);
  }
  const bool gives = std::any_of(
      call.shapes().begin(), call.shapes().end(), [](const auto& shape) {
        return shape.is_differentiable();
      });
  if (learns && gives) {
    unknown_.emplace(name);
  }
  call.record(std::move(node));
}

/// Graphs of torch.no_grad and torch.autocast, as if they were not nested.
bool GraphRun::run_nested(const Node& node, Names& names) {
  const std::string_view kind =
      std::string_view(node.target).substr(kHigherOrder.size());
  if (kind != "wrap_with_set_grad_enabled" && kind != "wrap_with_autocast" &&
      kind != "strict_mode" && kind != "wrap") {
    return false;
  }
  const exported::NestedGraph* nested = nullptr;
  bool records = tape_.records;
  std::vector<std::string> operands;
  for (const exported::NamedArgument& input : node.inputs) {
    const auto* graph =
        std::get_if<exported::NestedGraph>(&input.argument.value);
    nested = graph != nullptr ? graph : nested;
    const auto* flag = std::get_if<bool>(&input.argument.value);
    if (flag != nullptr && nested == nullptr &&
        kind == "wrap_with_set_grad_enabled") {
      records = *flag;
    }
    if (nested != nullptr) {
      for (std::string& name : tensor_names(input.argument)) {
        operands.push_back(std::move(name));
      }
    }
  }
  if (nested == nullptr || nested->graph == nullptr) {
    return false;
  }
  const bool before = std::exchange(tape_.records, records);
  run_inside(*nested->graph, operands, names_given(node), names);
  tape_.records = before;
  return true;
}

void GraphRun::run_inside(
    const Graph& graph,
    const std::vector<std::string>& operands,
    const std::vector<std::string>& given,
    Names& names) {
  Names inside;
  size_t next = 0;
  for (const exported::Argument& input : graph.inputs) {
    for (const std::string& name : tensor_names(input)) {
      const auto found =
          next < operands.size() ? names.find(operands[next]) : names.end();
      ++next;
      if (found != names.end()) {
        hold(inside, name, found->second);
      }
    }
  }
  run(graph, 0, graph.nodes.size(), last_reads(graph), inside);
  next = 0;
  for (const exported::Argument& output : graph.outputs) {
    for (const std::string& name : tensor_names(output)) {
      const auto found = inside.find(name);
      if (found != inside.end() && next < given.size()) {
        hold(names, given[next], found->second);
      }
      ++next;
    }
  }
  let_go(inside);
}

} // namespace tessera::plan
