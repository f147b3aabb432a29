#include "exported/format/signature_reader.h"

#include <map>
#include <string>
#include <string_view>

#include "exported/format/argument_reader.h"

namespace tessera::exported {
namespace {

using Written = decltype(WrittenInput::value);

Written read_written(const JsonAt& at) {
  const auto& tag = at.tag();
  const JsonAt value = at.tagged();
  if (tag == "as_none") {
    if (!value.boolean()) {
      value.fail("is false; None is written as true");
    }
    return None{};
  }
  if (tag == "as_int") {
    return value.integer();
  }
  if (tag == "as_float") {
    return value.number();
  }
  if (tag == "as_string") {
    return value.string();
  }
  if (tag == "as_bool") {
    return value.boolean();
  }
  at.refuse_tag();
}

std::string name_in_graph(const JsonAt& spec) {
  return read_tensor_name(spec.at("arg")).name;
}

[[noreturn]] void refuse_object_input(const JsonAt& spec) {
  spec.expect_only({"arg", "custom_obj_name"});
  const JsonAt object = spec.at("arg");
  object.expect_only({"name", "class_fqn"});
  refuse_object(
      spec,
      spec.at("custom_obj_name").string(),
      object.at("class_fqn").string());
}

struct OutputForm {
  OutputSpec::Kind kind;
  std::string_view path_field; // empty: has no path
  bool takes_any = false; // not only a tensor
};

const std::map<std::string_view, OutputForm>& output_forms() {
  using Kind = OutputSpec::Kind;
  static const std::map<std::string_view, OutputForm> all{
      {"user_output", {Kind::User, "", true}},
      {"loss_output", {Kind::Loss, ""}},
      {"buffer_mutation", {Kind::BufferMutation, "buffer_name"}},
      {"parameter_mutation", {Kind::ParameterMutation, "parameter_name"}},
      {"gradient_to_parameter", {Kind::GradientToParameter, "parameter_name"}},
      {"gradient_to_user_input",
       {Kind::GradientToUserInput, "user_input_name"}},
      {"user_input_mutation", {Kind::UserInputMutation, "user_input_name"}},
      {"token", {Kind::Token, ""}},
  };
  return all;
}

} // namespace

InputSpec read_input_spec(const JsonAt& at, const OddPaths& odd_paths) {
  const auto& tag = at.tag();
  const JsonAt spec = at.tagged();
  if (tag == "user_input") {
    spec.expect_only({"arg"});
    return UserInput{read_argument(spec.at("arg"), odd_paths)};
  }
  if (tag == "parameter") {
    spec.expect_only({"arg", "parameter_name"});
    return ParameterInput{
        .name = name_in_graph(spec),
        .path = spec.at("parameter_name").string()};
  }
  if (tag == "buffer") {
    spec.expect_only({"arg", "buffer_name", "persistent"});
    return BufferInput{
        .name = name_in_graph(spec),
        .path = spec.at("buffer_name").string(),
        .persistent = spec.at("persistent").boolean()};
  }
  if (tag == "tensor_constant") {
    spec.expect_only({"arg", "tensor_constant_name"});
    return ConstantInput{
        .name = name_in_graph(spec),
        .path = spec.at("tensor_constant_name").string()};
  }
  if (tag == "constant_input") {
    spec.expect_only({"name", "value"});
    return WrittenInput{
        .name = spec.at("name").string(),
        .value = read_written(spec.at("value"))};
  }
  if (tag == "token") {
    spec.expect_only({"arg"});
    return TokenInput{name_in_graph(spec)};
  }
  if (tag == "custom_obj") {
    refuse_object_input(spec);
  }
  at.refuse_tag();
}

OutputSpec read_output_spec(const JsonAt& at, const OddPaths& odd_paths) {
  const auto found = output_forms().find(at.tag());
  if (found == output_forms().end()) {
    at.refuse_tag();
  }
  const OutputForm& form = found->second;
  const JsonAt spec = at.tagged();
  OutputSpec output;
  output.kind = form.kind;
  if (form.path_field.empty()) {
    spec.expect_only({"arg"});
  } else {
    spec.expect_only({"arg", form.path_field});
    output.path = spec.at(form.path_field).string();
  }
  const JsonAt argument = spec.at("arg");
  output.argument = form.takes_any ? read_argument(argument, odd_paths)
                                   : Argument{read_tensor_name(argument)};
  return output;
}

} // namespace tessera::exported
