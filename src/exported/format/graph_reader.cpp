#include "exported/format/graph_reader.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/format_error.h"
#include "exported/format/argument_reader.h"
#include "exported/format/meta_reader.h"

namespace tessera::exported {
namespace {

// Codes of `kind`.
constexpr int64_t kPositional = 1;
constexpr int64_t kKeyword = 2;

std::vector<Argument> read_arguments(
    const JsonAt& at,
    const OddPaths& odd_paths) {
  std::vector<Argument> arguments;
  at.for_each_item([&](const JsonAt& item) {
    arguments.push_back(read_argument(item, odd_paths));
  });
  return arguments;
}

NamedArgument read_named_argument(const JsonAt& at, const OddPaths& odd_paths) {
  at.expect_only({"name", "arg", "kind"});
  NamedArgument argument{
      .name = at.at("name").string(),
      .argument = read_argument(at.at("arg"), odd_paths)};
  if (at.has("kind")) {
    const JsonAt kind = at.at("kind");
    const int64_t code = kind.integer();
    if (code != kPositional && code != kKeyword) {
      kind.refuse(
          "is " + std::to_string(code) +
          ", which is the code of no kind of arguments that is known");
    }
    argument.is_keyword = code == kKeyword;
  }
  return argument;
}

// Takes from the metadata only what is used here; anyone may add to it.
void read_metadata(const JsonAt& at, const OddPaths& odd_paths, Node* node) {
  at.for_each_field([&](const std::string& name, const JsonAt& value) {
    const auto& text = value.string();
    if (name == "stack_trace") {
      node->stack_trace = text;
    } else if (name == "nn_module_stack") {
      try {
        node->modules = read_module_frames(text, odd_paths);
      } catch (const format::FormatError& error) {
        value.fail(std::string("cannot be read: ") + error.what());
      }
    }
  });
}

Node read_node(const JsonAt& at, const OddPaths& odd_paths) {
  at.expect_only(
      {"target",
       "inputs",
       "outputs",
       "metadata",
       "is_hop_single_tensor_return",
       "name"});
  Node node;
  node.target = at.at("target").string();
  if (at.has("name")) {
    node.name = at.at("name").string();
  }
  at.at("inputs").for_each_item([&](const JsonAt& input) {
    node.inputs.push_back(read_named_argument(input, odd_paths));
  });
  node.outputs = read_arguments(at.at("outputs"), odd_paths);
  read_metadata(at.at("metadata"), odd_paths, &node);
  if (at.has("is_hop_single_tensor_return")) {
    node.returns_single_tensor = at.at("is_hop_single_tensor_return").boolean();
  }
  return node;
}

template <class Value, class Read>
std::map<std::string, Value> read_map(const JsonAt& at, const Read& read) {
  std::map<std::string, Value> map;
  at.for_each_field([&](const std::string& name, const JsonAt& value) {
    map.emplace(name, read(value));
  });
  return map;
}

void refuse_objects(const JsonAt& at) {
  at.for_each_field([](const std::string& name, const JsonAt& value) {
    value.expect_only({"name", "class_fqn"});
    refuse_object(value, name, value.at("class_fqn").string());
  });
}

} // namespace

Graph read_graph(const JsonAt& at, const OddPaths& odd_paths) {
  at.expect_only(
      {"inputs",
       "outputs",
       "nodes",
       "tensor_values",
       "sym_int_values",
       "sym_bool_values",
       "is_single_tensor_return",
       "custom_obj_values",
       "sym_float_values"});
  if (at.has("custom_obj_values")) {
    refuse_objects(at.at("custom_obj_values"));
  }
  Graph graph;
  graph.inputs = read_arguments(at.at("inputs"), odd_paths);
  graph.outputs = read_arguments(at.at("outputs"), odd_paths);
  at.at("nodes").for_each_item([&](const JsonAt& node) {
    graph.nodes.push_back(read_node(node, odd_paths));
  });
  graph.tensors =
      read_map<TensorMeta>(at.at("tensor_values"), read_tensor_meta);
  graph.ints = read_map<Expression<int64_t>>(
      at.at("sym_int_values"), read_int_expression);
  graph.bools = read_map<Expression<bool>>(
      at.at("sym_bool_values"), read_bool_expression);
  if (at.has("sym_float_values")) {
    graph.floats = read_map<Expression<double>>(
        at.at("sym_float_values"), read_float_expression);
  }
  if (at.has("is_single_tensor_return")) {
    graph.returns_single_tensor = at.at("is_single_tensor_return").boolean();
  }
  return graph;
}

} // namespace tessera::exported
