#include "exported/format/program_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "exported/format/archives.h"

namespace tessera::exported {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// A program of one node, whose argument is `argument`.
json program_with(json argument) {
  const json leaf = {
      {"type", nullptr},
      {"context", nullptr},
      {"children_spec", json::array()}};
  const auto tree = [](const char* type, const char* context, json children) {
    return json{
        {"type", type}, {"context", context}, {"children_spec", children}};
  };
  const json inputs = tree(
      "builtins.tuple",
      "null",
      {tree("builtins.tuple", "null", {leaf}),
       tree("builtins.dict", "[]", json::array())});
  const json x = {{"as_tensor", {{"name", "x"}}}};
  const json y = {{"as_tensor", {{"name", "y"}}}};
  const json meta = json::parse(
      R"({"dtype": 7, "sizes": [{"as_int": 2}], "requires_grad": false,
          "device": {"type": "cpu", "index": null}, "strides": [{"as_int": 1}],
          "storage_offset": {"as_int": 0}, "layout": 7})");
  const json node = {
      {"target", "torch.ops.aten.some.default"},
      {"inputs", {{{"name", "a"}, {"arg", argument}, {"kind", 2}}}},
      {"outputs", {y}},
      {"metadata", json::object()},
      {"is_hop_single_tensor_return", nullptr},
      {"name", "y"}};
  return {
      {"graph_module",
       {{"graph",
         {{"inputs", {x}},
          {"outputs", {y}},
          {"nodes", {node}},
          {"tensor_values", {{"x", meta}, {"y", meta}}},
          {"sym_int_values", json::object()},
          {"sym_bool_values", json::object()},
          {"sym_float_values", json::object()},
          {"custom_obj_values", json::object()},
          {"is_single_tensor_return", false}}},
        {"signature",
         {{"input_specs", {{{"user_input", {{"arg", x}}}}}},
          {"output_specs", {{{"user_output", {{"arg", y}}}}}}}},
        {"module_call_graph",
         {{{"fqn", ""},
           {"signature",
            {{"inputs", json::array()},
             {"outputs", json::array()},
             {"in_spec", json{1, inputs}.dump()},
             {"out_spec", json{1, leaf}.dump()},
             {"forward_arg_names", {"x"}}}}}}},
        {"metadata", json::object()},
        {"treespec_namedtuple_fields", json::object()}}},
      {"opset_version", {{"aten", 10}}},
      {"range_constraints", json::object()},
      {"schema_version", {{"major", 8}, {"minor", 20}}},
      {"verifiers", {"TRAINING"}},
      {"torch_version", "2.13.0"},
      {"guards_code", json::array()}};
}

json plain() {
  return program_with({{"as_none", true}});
}

Program parse(const json& program) {
  return read_program(program.dump(), "m.json");
}

std::string refusal_of_program(const json& program) {
  return format::refusal([&] { parse(program); });
}

/// What becomes of `{"as_...": ...}`.
Argument::Value value_of(const std::string& text) {
  return parse(program_with(json::parse(text)))
      .graph.nodes.at(0)
      .inputs.at(0)
      .argument.value;
}

template <class T>
T value_as(const std::string& text) {
  return std::get<T>(value_of(text));
}

std::vector<std::string> names(const std::vector<TensorName>& tensors) {
  std::vector<std::string> all;
  for (const auto& tensor : tensors) {
    all.push_back(tensor.name);
  }
  return all;
}

TEST(ArgumentTest, PlainValuesAndLists) {
  using Strings = std::vector<std::string>;
  value_as<None>(R"({"as_none": true})");
  EXPECT_EQ(value_as<int64_t>(R"({"as_int": -3})"), -3);
  EXPECT_EQ(value_as<int64_t>(R"({"as_int": 9223372036854775807})"), INT64_MAX);
  EXPECT_EQ(
      value_as<std::vector<int64_t>>(R"({"as_ints": [1, -2]})"),
      (std::vector<int64_t>{1, -2}));
  EXPECT_EQ(
      value_as<std::vector<std::vector<int64_t>>>(
          R"({"as_int_lists": [[1], [], [2, 3]]})"),
      (std::vector<std::vector<int64_t>>{{1}, {}, {2, 3}}));
  EXPECT_EQ(value_as<double>(R"({"as_float": 0.5})"), 0.5);
  EXPECT_EQ(
      value_as<std::vector<double>>(R"({"as_floats": [1.0, 2e30]})"),
      (std::vector<double>{1.0, 2e30}));
  EXPECT_EQ(
      value_as<std::vector<std::vector<double>>>(
          R"({"as_float_lists": [[1.5], []]})"),
      (std::vector<std::vector<double>>{{1.5}, {}}));
  EXPECT_EQ(value_as<bool>(R"({"as_bool": true})"), true);
  EXPECT_EQ(
      value_as<std::vector<bool>>(R"({"as_bools": [true, false]})"),
      (std::vector<bool>{true, false}));
  EXPECT_EQ(value_as<std::string>(R"({"as_string": "sum"})"), "sum");
  EXPECT_EQ(
      value_as<Strings>(R"({"as_strings": ["a", "b"]})"), (Strings{"a", "b"}));
  EXPECT_EQ(
      value_as<OperatorName>(R"({"as_operator": "torch.ops.aten.add"})").name,
      "torch.ops.aten.add");
  const auto complex = value_as<Complex>(
      R"({"as_complex": {"real": 1.5, "imag": "-Infinity"}})");
  EXPECT_EQ(complex.real, 1.5);
  EXPECT_EQ(complex.imag, -std::numeric_limits<double>::infinity());
}

TEST(ArgumentTest, FloatsThatAreNotFiniteAreStrings) {
  EXPECT_TRUE(std::isinf(value_as<double>(R"({"as_float": "Infinity"})")));
  EXPECT_LT(value_as<double>(R"({"as_float": "-Infinity"})"), 0);
  EXPECT_TRUE(std::isnan(value_as<double>(R"({"as_float": "NaN"})")));
  EXPECT_THAT(
      refusal_of_program(program_with({{"as_float", "inf"}})),
      HasSubstr("as_float is string, not a number"));
}

TEST(ArgumentTest, TensorsAndListsOfTensors) {
  using Strings = std::vector<std::string>;
  EXPECT_EQ(value_as<TensorName>(R"({"as_tensor": {"name": "x"}})").name, "x");
  EXPECT_EQ(
      names(value_as<std::vector<TensorName>>(
          R"({"as_tensors": [{"name": "x"}, {"name": "y"}]})")),
      (Strings{"x", "y"}));
  const auto nested = value_as<std::vector<std::vector<TensorName>>>(
      R"({"as_nested_tensors": [[{"name": "x"}], []]})");
  ASSERT_EQ(nested.size(), 2);
  EXPECT_EQ(names(nested[0]), Strings{"x"});
  const auto optional = value_as<std::vector<std::optional<TensorName>>>(
      R"({"as_optional_tensors": [{"as_none": true}, {"as_tensor": {"name": "x"}}]})");
  ASSERT_EQ(optional.size(), 2);
  EXPECT_FALSE(optional[0]);
  EXPECT_EQ(optional[1]->name, "x");
  EXPECT_FALSE(value_as<std::optional<TensorName>>(
      R"({"as_optional_tensor": {"as_none": true}})"));
}

TEST(ArgumentTest, SymbolicNumbers) {
  EXPECT_EQ(
      std::get<std::string>(
          value_as<SymbolicInt>(R"({"as_sym_int": {"as_name": "s"}})").value),
      "s");
  const auto ints = value_as<std::vector<SymbolicInt>>(
      R"({"as_sym_ints": [{"as_int": 2}, {"as_name": "s"}]})");
  EXPECT_EQ(std::get<int64_t>(ints.at(0).value), 2);
  EXPECT_EQ(std::get<std::string>(ints.at(1).value), "s");
  EXPECT_EQ(
      std::get<double>(
          value_as<SymbolicFloat>(R"({"as_sym_float": {"as_float": 2}})")
              .value),
      2.0);
  EXPECT_EQ(
      value_as<std::vector<SymbolicFloat>>(
          R"({"as_sym_floats": [{"as_name": "f"}]})")
          .size(),
      1);
  EXPECT_EQ(
      std::get<bool>(
          value_as<SymbolicBool>(R"({"as_sym_bool": {"as_bool": false}})")
              .value),
      false);
  EXPECT_EQ(
      value_as<std::vector<SymbolicBool>>(
          R"({"as_sym_bools": [{"as_name": "b"}]})")
          .size(),
      1);
}

TEST(ArgumentTest, CodesAreThoseOfTheFormat) {
  const std::vector<std::pair<int, DType>> dtypes{
      {1, DType::UInt8},           {2, DType::Int8},
      {3, DType::Int16},           {4, DType::Int32},
      {5, DType::Int64},           {6, DType::Float16},
      {7, DType::Float32},         {8, DType::Float64},
      {9, DType::Complex32},       {10, DType::Complex64},
      {11, DType::Complex128},     {12, DType::Bool},
      {13, DType::BFloat16},       {28, DType::UInt16},
      {29, DType::Float8E4M3FN},   {30, DType::Float8E5M2},
      {31, DType::Float8E4M3FNUZ}, {32, DType::Float8E5M2FNUZ},
      {33, DType::Float8E8M0FNU},  {34, DType::UInt32},
      {35, DType::UInt64}};
  ASSERT_EQ(dtypes.size(), static_cast<size_t>(format::kNumDTypes));
  for (const auto& [code, dtype] : dtypes) {
    EXPECT_EQ(
        value_as<DType>("{\"as_scalar_type\": " + std::to_string(code) + "}"),
        dtype);
  }
  EXPECT_EQ(value_as<Layout>(R"({"as_layout": 7})"), Layout::Strided);
  EXPECT_EQ(value_as<Layout>(R"({"as_layout": 1})"), Layout::SparseCoo);
  EXPECT_EQ(
      value_as<MemoryFormat>(R"({"as_memory_format": 4})"),
      MemoryFormat::Preserve);
  EXPECT_EQ(
      value_as<MemoryFormat>(R"({"as_memory_format": 1})"),
      MemoryFormat::Contiguous);
  for (const auto* form : {"as_scalar_type", "as_layout", "as_memory_format"}) {
    for (const int code : {0, 14, 99}) {
      EXPECT_THAT(
          refusal_of_program(program_with({{form, code}})),
          HasSubstr(
              std::string(form) + " is " + std::to_string(code) +
              ", which is the code of no "));
    }
  }
  const auto device =
      value_as<Device>(R"({"as_device": {"type": "cuda", "index": 1}})");
  EXPECT_EQ(device.type, "cuda");
  EXPECT_EQ(device.index, 1);
  EXPECT_FALSE(
      value_as<Device>(R"({"as_device": {"type": "cpu", "index": null}})")
          .index);
}

TEST(ArgumentTest, ArgumentsInArguments) {
  const auto map = value_as<std::shared_ptr<const ArgumentMap>>(
      R"({"as_string_to_argument": {"k": {"as_string_to_argument": {"i": {"as_int": 4}}}}})");
  const auto& inner =
      std::get<std::shared_ptr<const ArgumentMap>>(map->at("k").value);
  EXPECT_EQ(std::get<int64_t>(inner->at("i").value), 4);

  const json graph = plain()["graph_module"]["graph"];
  const auto outer =
      parse(program_with({{"as_graph", {{"name", "body"}, {"graph", graph}}}}));
  const auto nested = std::get<NestedGraph>(
      outer.graph.nodes.at(0).inputs.at(0).argument.value);
  EXPECT_EQ(nested.name, "body");
  EXPECT_EQ(nested.graph->nodes.at(0).name, "y");
}

TEST(ArgumentTest, WhatIsNotKnownIsRefusedWithItsPlace) {
  const std::string place = "m.json: graph_module.graph.nodes[0].inputs[0].arg";
  EXPECT_EQ(
      refusal_of_program(program_with({{"as_quaternion", 1}})),
      place + " is \"as_quaternion\", which is not known here");
  EXPECT_THAT(
      refusal_of_program(program_with({{"as_int", 1}, {"as_bool", true}})),
      StartsWith(place + " has 2 fields"));
  EXPECT_EQ(
      refusal_of_program(
          program_with({{"as_tensor", {{"name", "x"}, {"view", 1}}}})),
      place + ".as_tensor has the field \"view\", which is not known");
  EXPECT_EQ(
      refusal_of_program(program_with({{"as_tensor", json::object()}})),
      place + ".as_tensor has no field \"name\"");
  EXPECT_EQ(
      refusal_of_program(program_with({{"as_int", 1.5}})),
      place + ".as_int is number, not an integer");
  EXPECT_EQ(
      refusal_of_program(program_with({{"as_int", true}})),
      place + ".as_int is boolean, not an integer");
  EXPECT_EQ(
      refusal_of_program(program_with({{"as_int", UINT64_MAX}})),
      place + ".as_int the integer does not fit into 64 bits");
  EXPECT_EQ(
      refusal_of_program(program_with({{"as_none", false}})),
      place + ".as_none is false; None is written as true");
  EXPECT_EQ(
      refusal_of_program(program_with({{"as_ints", {1, "2"}}})),
      place + ".as_ints[1] is string, not an integer");
}

TEST(ArgumentTest, ObjectsAreRefusedByTheirClass) {
  const auto text = refusal_of_program(program_with(
      {{"as_custom_obj", {{"name", "queue"}, {"class_fqn", "ns.Queue"}}}}));
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("inputs[0].arg.as_custom_obj is an object of class "
                    "\"ns.Queue\" (\"queue\")"),
          HasSubstr("only Python can open")));
  auto program = plain();
  program["graph_module"]["graph"]["custom_obj_values"]["q"] = {
      {"name", "q"}, {"class_fqn", "ns.Queue"}};
  EXPECT_THAT(
      refusal_of_program(program), HasSubstr("object of class \"ns.Queue\""));
  program = plain();
  program["graph_module"]["signature"]["input_specs"][0] = {
      {"custom_obj",
       {{"arg", {{"name", "q"}, {"class_fqn", "ns.Queue"}}},
        {"custom_obj_name", "model.queue"}}}};
  EXPECT_THAT(
      refusal_of_program(program),
      HasSubstr("object of class \"ns.Queue\" (\"model.queue\")"));
  EXPECT_THROW(parse(program), format::UnsupportedFormat);
}

TEST(ProgramTest, KindsOfInputs) {
  const auto first_input = [](json spec, json argument) {
    auto program = plain();
    auto& graph_module = program["graph_module"];
    graph_module["graph"]["inputs"].push_back(argument);
    graph_module["signature"]["input_specs"].push_back(spec);
    return parse(program).inputs.at(1);
  };
  const json w = {{"name", "w"}};
  const json tensor = {{"as_tensor", w}};
  const auto parameter = std::get<ParameterInput>(first_input(
      {{"parameter", {{"arg", w}, {"parameter_name", "a.w"}}}}, tensor));
  EXPECT_EQ(parameter.name, "w");
  EXPECT_EQ(parameter.path, "a.w");
  const auto buffer = std::get<BufferInput>(first_input(
      {{"buffer", {{"arg", w}, {"buffer_name", "b"}, {"persistent", false}}}},
      tensor));
  EXPECT_EQ(buffer.path, "b");
  EXPECT_FALSE(buffer.persistent);
  EXPECT_EQ(
      std::get<ConstantInput>(
          first_input(
              {{"tensor_constant",
                {{"arg", w}, {"tensor_constant_name", "c"}}}},
              tensor))
          .path,
      "c");
  EXPECT_EQ(
      std::get<TokenInput>(
          first_input({{"token", {{"arg", w}}}}, {{"as_none", true}}))
          .name,
      "w");
}

TEST(ProgramTest, InputsThatAreWrittenKeepTheirTypes) {
  const auto written = [](json value) {
    auto program = plain();
    auto& graph_module = program["graph_module"];
    graph_module["graph"]["inputs"][0] = {{"as_none", true}};
    graph_module["signature"]["input_specs"][0] = {
        {"constant_input", {{"name", "x"}, {"value", value}}}};
    return std::get<WrittenInput>(parse(program).inputs.at(0)).value;
  };
  EXPECT_EQ(std::get<int64_t>(written({{"as_int", 3}})), 3);
  EXPECT_EQ(std::get<double>(written({{"as_float", 3.0}})), 3.0);
  EXPECT_TRUE(std::isnan(std::get<double>(written({{"as_float", "NaN"}}))));
  EXPECT_EQ(std::get<bool>(written({{"as_bool", true}})), true);
  EXPECT_EQ(std::get<std::string>(written({{"as_string", "s"}})), "s");
  EXPECT_TRUE(std::holds_alternative<None>(written({{"as_none", true}})));
}

TEST(ProgramTest, KindsOfOutputs) {
  using Kind = OutputSpec::Kind;
  const std::vector<std::tuple<std::string, std::string, Kind>> kinds{
      {"buffer_mutation", "buffer_name", Kind::BufferMutation},
      {"parameter_mutation", "parameter_name", Kind::ParameterMutation},
      {"gradient_to_parameter", "parameter_name", Kind::GradientToParameter},
      {"gradient_to_user_input", "user_input_name", Kind::GradientToUserInput},
      {"user_input_mutation", "user_input_name", Kind::UserInputMutation},
      {"token", "", Kind::Token},
  };
  for (const auto& [tag, field, kind] : kinds) {
    auto program = plain();
    auto& graph_module = program["graph_module"];
    graph_module["graph"]["outputs"].push_back(
        graph_module["graph"]["outputs"][0]);
    json spec = {{"arg", {{"name", "y"}}}};
    if (!field.empty()) {
      spec[field] = "path";
    }
    graph_module["signature"]["output_specs"].push_back({{tag, spec}});
    const auto output = parse(program).outputs.at(1);
    EXPECT_EQ(output.kind, kind) << tag;
    EXPECT_EQ(output.path, field.empty() ? "" : "path") << tag;
    EXPECT_EQ(std::get<TensorName>(output.argument.value).name, "y");
  }
  auto program = plain();
  program["graph_module"]["signature"]["output_specs"][0] = {
      {"loss_output", {{"arg", {{"name", "y"}}}}}};
  EXPECT_EQ(parse(program).outputs.at(0).kind, Kind::Loss);
}

TEST(ProgramTest, RangesGuardsAndExpressions) {
  auto program = plain();
  program["range_constraints"] = {
      {"s0", {{"min_val", 2}, {"max_val", nullptr}}}};
  program["guards_code"] = {"L['x'].size()[0] > 1"};
  auto& graph = program["graph_module"]["graph"];
  graph["sym_int_values"]["n"] = json::parse(
      R"({"as_expr": {"expr_str": "2*s0", "hint": {"as_int": 8}}})");
  graph["sym_float_values"]["f"] = {{"as_float", "Infinity"}};
  graph["sym_bool_values"]["b"] =
      json::parse(R"({"as_expr": {"expr_str": "s0 > 1", "hint": null}})");
  const auto read = parse(program);
  EXPECT_EQ(read.ranges.at("s0").min, 2);
  EXPECT_FALSE(read.ranges.at("s0").max);
  EXPECT_EQ(read.guards, program["guards_code"]);
  EXPECT_EQ(std::get<std::string>(read.graph.ints.at("n").value), "2*s0");
  EXPECT_TRUE(std::isinf(std::get<double>(read.graph.floats.at("f").value)));
  EXPECT_EQ(std::get<std::string>(read.graph.bools.at("b").value), "s0 > 1");
  EXPECT_TRUE(read.graph.nodes.at(0).inputs.at(0).is_keyword);
}

TEST(ProgramTest, FieldsWithADefaultMayBeMissing) {
  auto program = plain();
  for (const auto* name : {"verifiers", "torch_version", "guards_code"}) {
    program.erase(name);
  }
  auto& graph_module = program["graph_module"];
  graph_module.erase("metadata");
  graph_module.erase("treespec_namedtuple_fields");
  for (const auto* name :
       {"custom_obj_values", "sym_float_values", "is_single_tensor_return"}) {
    graph_module["graph"].erase(name);
  }
  graph_module["graph"]["nodes"][0].erase("name");
  graph_module["graph"]["nodes"][0].erase("is_hop_single_tensor_return");
  graph_module["graph"]["nodes"][0]["inputs"][0].erase("kind");
  EXPECT_FALSE(parse(program).graph.nodes.at(0).inputs.at(0).is_keyword);
  for (const auto* name : {"inputs", "outputs", "nodes", "tensor_values"}) {
    auto without = plain();
    without["graph_module"]["graph"].erase(name);
    EXPECT_THAT(
        refusal_of_program(without),
        HasSubstr("graph_module.graph has no field \"" + std::string(name)));
  }
}

TEST(ProgramTest, AnotherMajorVersionIsRefusedWithBothNumbers) {
  for (const int major : {7, 9}) {
    auto program = plain();
    program["schema_version"]["major"] = major;
    program["new_field"] = 1;
    EXPECT_EQ(
        refusal_of_program(program),
        "m.json: schema_version is " + std::to_string(major) +
            ".20, and versions 8.x are read; export the model again with a "
            "torch of 2.11 to 2.13");
  }
}

TEST(ProgramTest, ANewerMinorVersionIsReadIfItsFieldsAreKnown) {
  auto program = plain();
  program["schema_version"]["minor"] = 21;
  EXPECT_EQ(parse(program).schema_minor, 21);
  program["graph_module"]["graph"]["nodes"][0]["stream"] = 1;
  EXPECT_EQ(
      refusal_of_program(program),
      "m.json: graph_module.graph.nodes[0] has the field \"stream\", which is "
      "not known. The file has schema 8.21, newer than 8.20, the newest that "
      "is known");
  EXPECT_THROW(parse(program), format::UnsupportedFormat);
}

TEST(ProgramTest, SignatureAndGraphAgree) {
  auto program = plain();
  program["graph_module"]["signature"]["input_specs"] = json::array();
  EXPECT_THAT(
      refusal_of_program(program),
      HasSubstr("has 1 inputs of the graph, and the signature has 0"));
  program = plain();
  program["graph_module"]["graph"]["inputs"][0]["as_tensor"]["name"] = "z";
  EXPECT_THAT(
      refusal_of_program(program),
      HasSubstr("another input 0 in its graph than in its signature, which "
                "says \"x\""));
  program = plain();
  program["graph_module"]["module_call_graph"] = json::array();
  EXPECT_THAT(
      refusal_of_program(program),
      HasSubstr("does not say how the model is called"));
  program = plain();
  auto& out =
      program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"];
  out =
      R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": []}])";
  EXPECT_THAT(
      refusal_of_program(program),
      HasSubstr("has 1 outputs that the caller gets, and out_spec has 0"));
}

TEST(ProgramTest, HostileJsonIsRefused) {
  EXPECT_THAT(
      format::refusal([] { read_program("{", "m.json"); }),
      StartsWith("m.json: byte "));
  const auto nested = [](const std::string& open, const std::string& close) {
    std::string text;
    for (int i = 0; i < 100000; ++i) {
      text += open;
    }
    for (int i = 0; i < 100000; ++i) {
      text += close;
    }
    return format::refusal([&] { read_program(text, "m.json"); });
  };
  EXPECT_THAT(nested("[", "]"), HasSubstr("nests too deeply"));
  EXPECT_THAT(
      nested("{\"as_string_to_argument\":", "}"),
      HasSubstr("nests too deeply"));
  EXPECT_THAT(
      format::refusal([] { read_program(R"({"a": 1, "a": 2})", "m.json"); }),
      HasSubstr("\"a\" appears twice"));
  EXPECT_THAT(
      refusal_of_program(json::array()), HasSubstr("is array, not an object"));
}

} // namespace
} // namespace tessera::exported
