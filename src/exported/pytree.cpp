#include "exported/pytree.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

namespace tessera::exported {
namespace {

bool has_keys(const TreeSpec& spec) {
  return !spec.keys.empty() && spec.keys.size() == spec.children.size();
}

std::string child_name(
    const TreeSpec& spec,
    const std::string& name,
    size_t index) {
  return has_keys(spec) ? fmt::format("{}['{}']", name, spec.keys[index])
                        : fmt::format("{}[{}]", name, index);
}

std::string expected_form(const TreeSpec& spec) {
  switch (spec.kind) {
    case TreeSpec::Kind::None:
      return "None";
    case TreeSpec::Kind::Tuple:
      return fmt::format("a tuple of {}", spec.children.size());
    case TreeSpec::Kind::List:
      return fmt::format("a list of {}", spec.children.size());
    default:
      break;
  }
  return has_keys(spec)
      ? fmt::format(
            "a dict with the keys \"{}\"", fmt::join(spec.keys, "\", \""))
      : fmt::format("a {} of {}", spec.type_name, spec.children.size());
}

[[noreturn]] void refuse_form(
    const TreeSpec& spec,
    const std::string& name,
    const ExportedValue& value) {
  raise<c10::ValueError>(
      {.call = "forward"},
      fmt::format(
          "the input \"{}\" is {}, but the model was exported with {}.",
          name,
          value.describe(),
          expected_form(spec)));
}

} // namespace

void leaf_names(
    const TreeSpec& spec,
    const std::string& name,
    std::vector<std::string>& names) {
  if (spec.kind == TreeSpec::Kind::Leaf) {
    names.push_back(name);
    return;
  }
  for (size_t i = 0; i < spec.children.size(); ++i) {
    leaf_names(spec.children[i], child_name(spec, name, i), names);
  }
}

void flatten_value(
    const TreeSpec& spec,
    const std::string& name,
    const ExportedValue& value,
    std::vector<const ExportedValue*>& leaves) {
  using Kind = ExportedValue::Kind;
  if (spec.kind == TreeSpec::Kind::Leaf) {
    leaves.push_back(&value);
    return;
  }
  if (spec.kind == TreeSpec::Kind::None) {
    if (!value.is_none()) {
      refuse_form(spec, name, value);
    }
    return;
  }
  if (value.size() != spec.children.size()) {
    refuse_form(spec, name, value);
  }
  const bool is_sequence =
      value.kind() == Kind::List || value.kind() == Kind::Tuple;
  const bool takes_sequence = spec.kind != TreeSpec::Kind::Dict;
  const bool is_empty_dict = value.kind() == Kind::Dict && value.size() == 0;
  for (size_t i = 0; i < spec.children.size(); ++i) {
    const ExportedValue* child = nullptr;
    if (is_sequence && takes_sequence) {
      child = &value[i];
    } else if (has_keys(spec) && value.contains(spec.keys[i])) {
      child = &value[spec.keys[i]];
    } else {
      refuse_form(spec, name, value);
    }
    flatten_value(spec.children[i], child_name(spec, name, i), *child, leaves);
  }
  if (spec.children.empty() && !(is_sequence && takes_sequence) &&
      !is_empty_dict) {
    refuse_form(spec, name, value);
  }
}

ExportedValue unflatten_value(
    const TreeSpec& spec,
    const std::vector<c10::IValue>& leaves,
    size_t& next) {
  if (spec.kind == TreeSpec::Kind::Leaf) {
    TESSERA_INTERNAL_ASSERT(next < leaves.size(), "results of a program");
    return to_value(leaves[next++]);
  }
  if (spec.kind == TreeSpec::Kind::None) {
    return {};
  }
  std::vector<ExportedValue> children;
  for (const TreeSpec& child : spec.children) {
    children.push_back(unflatten_value(child, leaves, next));
  }
  if (spec.kind == TreeSpec::Kind::List) {
    return ExportedValue::list(std::move(children));
  }
  if (has_keys(spec) || spec.kind == TreeSpec::Kind::Dict) {
    std::vector<ExportedValue::Item> items;
    for (size_t i = 0; i < children.size(); ++i) {
      items.emplace_back(spec.keys[i], std::move(children[i]));
    }
    return ExportedValue::dict(std::move(items));
  }
  return ExportedValue::tuple(std::move(children));
}

c10::IValue to_ivalue(const ExportedValue& value) {
  using Kind = ExportedValue::Kind;
  switch (value.kind()) {
    case Kind::Tensor:
      return value.tensor();
    case Kind::Int:
      return value.to_int();
    case Kind::Float:
      return value.to_float();
    case Kind::Bool:
      return value.to_bool();
    case Kind::String:
      return value.to_string();
    default:
      return {};
  }
}

ExportedValue to_value(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor();
  }
  if (value.isBool()) {
    return value.toBool();
  }
  if (value.isInt()) {
    return value.toInt();
  }
  if (value.isDouble()) {
    return value.toDouble();
  }
  if (value.isString()) {
    return value.toStringRef();
  }
  TESSERA_INTERNAL_ASSERT(value.isNone(), "a result of an unknown kind");
  return {};
}

} // namespace tessera::exported
