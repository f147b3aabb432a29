#include "exported/format/argument_reader.h"

#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/format/format_error.h"
#include "exported/format/graph_reader.h"
#include "exported/format/meta_reader.h"

namespace tessera::exported {
namespace {

using Value = Argument::Value;

template <class Item, class Read>
std::vector<Item> read_items(const JsonAt& at, const Read& read) {
  std::vector<Item> items;
  at.for_each_item([&](const JsonAt& item) { items.push_back(read(item)); });
  return items;
}

int64_t as_int(const JsonAt& at) {
  return at.integer();
}

double as_float(const JsonAt& at) {
  return at.number();
}

bool as_bool(const JsonAt& at) {
  return at.boolean();
}

std::string as_string(const JsonAt& at) {
  return at.string();
}

// `as_none` is always true.
None as_none(const JsonAt& at) {
  if (!at.boolean()) {
    at.fail("is false; None is written as true");
  }
  return {};
}

std::optional<TensorName> as_optional_tensor(const JsonAt& at) {
  const auto& tag = at.tag();
  if (tag == "as_tensor") {
    return read_tensor_name(at.tagged());
  }
  if (tag == "as_none") {
    as_none(at.tagged());
    return std::nullopt;
  }
  at.refuse_tag();
}

template <class Number, class Read>
Symbolic<Number> as_symbolic(
    const JsonAt& at,
    std::string_view written,
    const Read& read) {
  const auto& tag = at.tag();
  if (tag == "as_name") {
    return {at.tagged().string()};
  }
  if (tag == written) {
    return {Number{read(at.tagged())}};
  }
  at.refuse_tag();
}

SymbolicInt as_sym_int(const JsonAt& at) {
  return as_symbolic<int64_t>(at, "as_int", as_int);
}

SymbolicFloat as_sym_float(const JsonAt& at) {
  return as_symbolic<double>(at, "as_float", as_float);
}

SymbolicBool as_sym_bool(const JsonAt& at) {
  return as_symbolic<bool>(at, "as_bool", as_bool);
}

Complex as_complex(const JsonAt& at) {
  at.expect_only({"real", "imag"});
  return {.real = at.at("real").number(), .imag = at.at("imag").number()};
}

NestedGraph as_graph(const JsonAt& at, const OddPaths& odd_paths) {
  at.expect_only({"name", "graph"});
  return {
      .name = at.at("name").string(),
      .graph =
          std::make_shared<const Graph>(read_graph(at.at("graph"), odd_paths))};
}

CustomObject as_custom_obj(const JsonAt& at) {
  at.expect_only({"name", "class_fqn"});
  refuse_object(at, at.at("name").string(), at.at("class_fqn").string());
}

std::shared_ptr<const ArgumentMap> as_string_to_argument(
    const JsonAt& at,
    const OddPaths& odd_paths) {
  ArgumentMap map;
  at.for_each_field([&](const std::string& name, const JsonAt& value) {
    map.emplace(name, read_argument(value, odd_paths));
  });
  return std::make_shared<const ArgumentMap>(std::move(map));
}

template <auto read>
Value one(const JsonAt& at) {
  return Value(read(at));
}

template <auto read>
auto list_of(const JsonAt& at) {
  return read_items<decltype(read(at))>(at, read);
}

template <auto read>
Value many(const JsonAt& at) {
  return Value(list_of<read>(at));
}

template <auto read>
Value lists(const JsonAt& at) {
  return Value(read_items<decltype(list_of<read>(at))>(at, list_of<read>));
}

OperatorName as_operator(const JsonAt& at) {
  return {at.string()};
}

// Forms that hold no arguments.
const std::map<std::string_view, Value (*)(const JsonAt&)>& simple_forms() {
  static const std::map<std::string_view, Value (*)(const JsonAt&)> all{
      {"as_none", one<as_none>},
      {"as_tensor", one<read_tensor_name>},
      {"as_tensors", many<read_tensor_name>},
      {"as_optional_tensor", one<as_optional_tensor>},
      {"as_optional_tensors", many<as_optional_tensor>},
      {"as_nested_tensors", lists<read_tensor_name>},
      {"as_int", one<as_int>},
      {"as_ints", many<as_int>},
      {"as_int_lists", lists<as_int>},
      {"as_float", one<as_float>},
      {"as_floats", many<as_float>},
      {"as_float_lists", lists<as_float>},
      {"as_bool", one<as_bool>},
      {"as_bools", many<as_bool>},
      {"as_string", one<as_string>},
      {"as_strings", many<as_string>},
      {"as_sym_int", one<as_sym_int>},
      {"as_sym_ints", many<as_sym_int>},
      {"as_sym_float", one<as_sym_float>},
      {"as_sym_floats", many<as_sym_float>},
      {"as_sym_bool", one<as_sym_bool>},
      {"as_sym_bools", many<as_sym_bool>},
      {"as_complex", one<as_complex>},
      {"as_scalar_type", one<read_dtype>},
      {"as_layout", one<read_layout>},
      {"as_memory_format", one<read_memory_format>},
      {"as_device", one<read_device>},
      {"as_custom_obj", one<as_custom_obj>},
      {"as_operator", one<as_operator>},
  };
  return all;
}

} // namespace

Argument read_argument(const JsonAt& at, const OddPaths& odd_paths) {
  const auto& tag = at.tag();
  if (tag == "as_graph") {
    return {as_graph(at.tagged(), odd_paths)};
  }
  if (tag == "as_string_to_argument") {
    return {as_string_to_argument(at.tagged(), odd_paths)};
  }
  const auto form = simple_forms().find(tag);
  if (form == simple_forms().end()) {
    at.refuse_tag();
  }
  return {form->second(at.tagged())};
}

TensorName read_tensor_name(const JsonAt& at) {
  at.expect_only({"name"});
  return {at.at("name").string()};
}

void refuse_object(
    const JsonAt& at,
    const std::string& name,
    const std::string& class_name) {
  at.refuse(
      "is an object of class " + format::in_quotes(class_name) + " (" +
      format::in_quotes(name) +
      "), which only Python can open; export a model that computes with tensors and numbers alone");
}

} // namespace tessera::exported
