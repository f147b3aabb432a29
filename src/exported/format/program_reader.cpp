#include "exported/format/program_reader.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/format/format_error.h"
#include "exported/format/argument_reader.h"
#include "exported/format/entry_json.h"
#include "exported/format/graph_reader.h"
#include "exported/format/json_at.h"
#include "exported/format/signature_reader.h"
#include "exported/format/tree_spec_reader.h"

namespace tessera::exported {
namespace {

using format::in_quotes;
using format::UnsupportedFormat;

// A graph that is an argument of a node lies some ten levels deeper than it.
constexpr int kProgramDepth = 400;

std::vector<std::string> read_strings(const JsonAt& at) {
  std::vector<std::string> strings;
  at.for_each_item(
      [&](const JsonAt& item) { strings.push_back(item.string()); });
  return strings;
}

void read_versions(const JsonAt& root, Program* program) {
  const JsonAt version = root.at("schema_version");
  version.expect_only({"major", "minor"});
  program->schema_major = version.at("major").integer();
  program->schema_minor = version.at("minor").integer();
  if (program->schema_major != kSchemaMajor) {
    version.refuse(
        "is " + std::to_string(program->schema_major) + "." +
        std::to_string(program->schema_minor) + ", and versions " +
        std::to_string(kSchemaMajor) +
        ".x are read; export the model again with a torch of 2.11 to 2.13");
  }
  if (root.has("torch_version")) {
    program->torch_version = root.at("torch_version").string();
  }
}

NamedTupleFields read_named_tuples(const JsonAt& graph_module) {
  NamedTupleFields fields;
  if (graph_module.has("treespec_namedtuple_fields")) {
    graph_module.at("treespec_namedtuple_fields")
        .for_each_field([&](const std::string& type, const JsonAt& value) {
          value.expect_only({"field_names"});
          fields.emplace(type, read_strings(value.at("field_names")));
        });
  }
  return fields;
}

ModuleCall read_module_call(
    const JsonAt& at,
    const NamedTupleFields& named_tuples) {
  at.expect_only({"fqn", "signature"});
  ModuleCall call;
  call.path = at.at("fqn").string();
  if (at.has("signature")) {
    const JsonAt signature = at.at("signature");
    signature.expect_only(
        {"inputs", "outputs", "in_spec", "out_spec", "forward_arg_names"});
    const OddPaths none({});
    for (const auto* side : {"inputs", "outputs"}) {
      signature.at(side).for_each_item(
          [&](const JsonAt& item) { read_argument(item, none); });
    }
    call.inputs = read_tree_spec(signature.at("in_spec"), named_tuples);
    call.outputs = read_tree_spec(signature.at("out_spec"), named_tuples);
    if (signature.has("forward_arg_names")) {
      call.input_names = read_strings(signature.at("forward_arg_names"));
    }
  }
  return call;
}

void read_signature(
    const JsonAt& at,
    const OddPaths& odd_paths,
    Program* program) {
  at.expect_only({"input_specs", "output_specs"});
  at.at("input_specs").for_each_item([&](const JsonAt& spec) {
    program->inputs.push_back(read_input_spec(spec, odd_paths));
  });
  at.at("output_specs").for_each_item([&](const JsonAt& spec) {
    program->outputs.push_back(read_output_spec(spec, odd_paths));
  });
}

void read_graph_module(const JsonAt& at, Program* program) {
  at.expect_only(
      {"graph",
       "signature",
       "module_call_graph",
       "metadata",
       "treespec_namedtuple_fields"});
  const auto named_tuples = read_named_tuples(at);
  std::vector<std::string> paths;
  at.at("module_call_graph").for_each_item([&](const JsonAt& call) {
    program->module_calls.push_back(read_module_call(call, named_tuples));
    paths.push_back(program->module_calls.back().path);
  });
  const OddPaths odd_paths(paths);
  program->graph = read_graph(at.at("graph"), odd_paths);
  read_signature(at.at("signature"), odd_paths, program);
}

void read_ranges(const JsonAt& at, Program* program) {
  at.for_each_field([&](const std::string& symbol, const JsonAt& value) {
    value.expect_only({"min_val", "max_val"});
    Range range;
    if (value.has("min_val")) {
      range.min = value.at("min_val").integer();
    }
    if (value.has("max_val")) {
      range.max = value.at("max_val").integer();
    }
    program->ranges.emplace(symbol, range);
  });
}

// The name that an input has in the graph, where the signature says so.
const std::string* name_of_input(const InputSpec& spec) {
  if (const auto* input = std::get_if<ParameterInput>(&spec)) {
    return &input->name;
  }
  if (const auto* input = std::get_if<BufferInput>(&spec)) {
    return &input->name;
  }
  if (const auto* input = std::get_if<ConstantInput>(&spec)) {
    return &input->name;
  }
  if (const auto* input = std::get_if<UserInput>(&spec)) {
    const auto* tensor = std::get_if<TensorName>(&input->argument.value);
    return tensor ? &tensor->name : nullptr;
  }
  return nullptr;
}

void check_count(
    const JsonAt& root,
    size_t count,
    size_t expected,
    const std::string& of,
    const std::string& in) {
  if (count != expected) {
    root.fail(
        "has " + std::to_string(expected) + " " + of + ", and " + in + " has " +
        std::to_string(count));
  }
}

void check_signature(const JsonAt& root, const Program& program) {
  const auto& graph = program.graph;
  check_count(
      root,
      program.inputs.size(),
      graph.inputs.size(),
      "inputs of the graph",
      "the signature");
  check_count(
      root,
      program.outputs.size(),
      graph.outputs.size(),
      "outputs of the graph",
      "the signature");
  for (size_t i = 0; i < graph.inputs.size(); ++i) {
    const auto* name = name_of_input(program.inputs[i]);
    const auto* tensor = std::get_if<TensorName>(&graph.inputs[i].value);
    if (name && (!tensor || tensor->name != *name)) {
      root.fail(
          "has another input " + std::to_string(i) +
          " in its graph than in its signature, which says " +
          in_quotes(*name));
    }
  }
}

// The leaves of the Python values are the user's inputs and outputs.
void check_trees(const JsonAt& root, const Program& program) {
  if (program.module_calls.empty() || !program.module_calls[0].path.empty() ||
      !program.module_calls[0].inputs) {
    root.fail(
        "does not say how the model is called: the first entry of module_call_graph is not the model");
  }
  size_t inputs = 0;
  for (const auto& spec : program.inputs) {
    inputs += std::holds_alternative<UserInput>(spec) ||
        std::holds_alternative<WrittenInput>(spec);
  }
  size_t outputs = 0;
  for (const auto& spec : program.outputs) {
    outputs += spec.kind == OutputSpec::Kind::User ||
        spec.kind == OutputSpec::Kind::Loss;
  }
  const auto& call = program.module_calls[0];
  check_count(
      root,
      static_cast<size_t>(call.inputs->num_leaves()),
      inputs,
      "inputs that the caller gives",
      "in_spec");
  check_count(
      root,
      static_cast<size_t>(call.outputs->num_leaves()),
      outputs,
      "outputs that the caller gets",
      "out_spec");
}

void read_whole(const JsonAt& root, Program* program) {
  root.expect_only(
      {"graph_module",
       "opset_version",
       "range_constraints",
       "schema_version",
       "verifiers",
       "torch_version",
       "guards_code"});
  read_graph_module(root.at("graph_module"), program);
  root.at("opset_version")
      .for_each_field(
          [](const std::string&, const JsonAt& version) { version.integer(); });
  read_ranges(root.at("range_constraints"), program);
  if (root.has("verifiers")) {
    read_strings(root.at("verifiers"));
  }
  if (root.has("guards_code")) {
    program->guards = read_strings(root.at("guards_code"));
  }
  check_signature(root, *program);
  check_trees(root, *program);
}

} // namespace

Program read_program(std::string_view json, std::string_view entry) {
  const auto parsed = read_entry_json(json, entry, kProgramDepth);
  const JsonAt root(parsed, entry);
  Program program;
  read_versions(root, &program);
  try {
    read_whole(root, &program);
  } catch (const UnsupportedFormat& error) {
    if (program.schema_minor <= kSchemaMinor) {
      throw;
    }
    throw UnsupportedFormat(
        std::string(error.what()) + ". The file has schema " +
        std::to_string(program.schema_major) + "." +
        std::to_string(program.schema_minor) + ", newer than " +
        std::to_string(kSchemaMajor) + "." + std::to_string(kSchemaMinor) +
        ", the newest that is known");
  }
  return program;
}

} // namespace tessera::exported
