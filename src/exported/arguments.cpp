#include "exported/arguments.h"

#include <ATen/core/jit_type.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>

#include "checkpoint/scalar_type.h"
#include "exported/overloaded.h"

namespace tessera::exported {
namespace {

using c10::IValue;
using c10::TypeKind;

int64_t layout_code(Layout layout) {
  switch (layout) {
    case Layout::Strided:
      return static_cast<int64_t>(c10::kStrided);
    case Layout::SparseCoo:
      return static_cast<int64_t>(c10::kSparse);
    case Layout::SparseCsr:
      return static_cast<int64_t>(c10::kSparseCsr);
    case Layout::SparseCsc:
      return static_cast<int64_t>(c10::kSparseCsc);
    case Layout::SparseBsr:
      return static_cast<int64_t>(c10::kSparseBsr);
    case Layout::SparseBsc:
      return static_cast<int64_t>(c10::kSparseBsc);
    case Layout::Mkldnn:
      return static_cast<int64_t>(c10::kMkldnn);
  }
  return 0;
}

int64_t memory_format_code(MemoryFormat format) {
  switch (format) {
    case MemoryFormat::Contiguous:
      return static_cast<int64_t>(c10::MemoryFormat::Contiguous);
    case MemoryFormat::ChannelsLast:
      return static_cast<int64_t>(c10::MemoryFormat::ChannelsLast);
    case MemoryFormat::ChannelsLast3d:
      return static_cast<int64_t>(c10::MemoryFormat::ChannelsLast3d);
    case MemoryFormat::Preserve:
      return static_cast<int64_t>(c10::MemoryFormat::Preserve);
  }
  return 0;
}

/// The type of an argument that is not None.
c10::TypePtr given_type(const c10::TypePtr& type) {
  if (const auto optional = type->cast<c10::OptionalType>()) {
    return optional->getElementType();
  }
  return type;
}

Operand::Form list_form(const c10::TypePtr& element) {
  switch (element->kind()) {
    case TypeKind::TensorType:
      return Operand::Form::Tensors;
    case TypeKind::OptionalType:
      return Operand::Form::OptionalTensors;
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return Operand::Form::Ints;
    case TypeKind::FloatType:
    case TypeKind::SymFloatType:
      return Operand::Form::Floats;
    case TypeKind::BoolType:
    case TypeKind::SymBoolType:
      return Operand::Form::Bools;
    case TypeKind::StringType:
      return Operand::Form::Strings;
    case TypeKind::NumberType:
      return Operand::Form::Numbers;
    default:
      throw RefusedNode("takes a list of " + element->str());
  }
}

/// The form of a list whose operator does not tell: that of its elements.
Operand::Form form_of(const Argument& argument) {
  return std::visit(
      Overloaded{
          [](const std::vector<std::string>&) {
            return Operand::Form::Strings;
          },
          [](const std::vector<int64_t>&) { return Operand::Form::Ints; },
          [](const std::vector<SymbolicInt>&) { return Operand::Form::Ints; },
          [](const std::vector<double>&) { return Operand::Form::Floats; },
          [](const std::vector<SymbolicFloat>&) {
            return Operand::Form::Floats;
          },
          [](const std::vector<bool>&) { return Operand::Form::Bools; },
          [](const std::vector<SymbolicBool>&) { return Operand::Form::Bools; },
          [](const auto&) { return Operand::Form::OptionalTensors; }},
      argument.value);
}

} // namespace

bool is_list(const Argument& argument) {
  return std::visit(
      Overloaded{
          []<class Element>(const std::vector<Element>&) { return true; },
          [](const auto&) { return false; }},
      argument.value);
}

void Arguments::define(const std::string& name, Source source) {
  names_[name] = source;
}

Source Arguments::named(const std::string& name) const {
  const auto found = names_.find(name);
  if (found == names_.end()) {
    throw RefusedNode("reads \"" + name + "\", which no node before it gives");
  }
  return found->second;
}

Source Arguments::constant(IValue value) {
  code_.constants.push_back(std::move(value));
  return {
      Source::From::Constant,
      static_cast<uint32_t>(code_.constants.size() - 1)};
}

Source Arguments::source(const Argument& argument) {
  return std::visit(
      Overloaded{
          [&](const None&) { return constant({}); },
          [&](const TensorName& tensor) { return named(tensor.name); },
          [&](const std::optional<TensorName>& tensor) {
            return tensor ? named(tensor->name) : constant({});
          },
          [&]<class Number>(const Symbolic<Number>& number) {
            const auto* name = std::get_if<std::string>(&number.value);
            return name != nullptr ? named(*name)
                                   : constant(std::get<Number>(number.value));
          },
          [&](int64_t number) { return constant(number); },
          [&](double number) { return constant(number); },
          [&](bool flag) { return constant(flag); },
          [&](const std::string& text) { return constant(text); },
          [&](const Complex& number) {
            return constant(c10::complex<double>(number.real, number.imag));
          },
          [&](DType dtype) {
            return constant(
                static_cast<int64_t>(checkpoint::scalar_type(dtype)));
          },
          [&](Layout layout) { return constant(layout_code(layout)); },
          [&](MemoryFormat format) {
            return constant(memory_format_code(format));
          },
          [&](const Device& device) {
            return constant(placement_.map(device));
          },
          [&](const NestedGraph& graph) -> Source {
            throw RefusedNode("takes the graph \"" + graph.name + "\"");
          },
          [&](const CustomObject& object) -> Source {
            throw RefusedNode(
                "takes the object \"" + object.name + "\" of class " +
                object.class_name);
          },
          [&](const OperatorName& name) -> Source {
            throw RefusedNode("takes the operator " + name.name);
          },
          [&](const std::shared_ptr<const ArgumentMap>&) -> Source {
            throw RefusedNode("takes a dictionary");
          },
          [&](const auto&) -> Source {
            throw RefusedNode("takes a list where a single value stands");
          }},
      argument.value);
}

std::vector<Source> Arguments::elements(const Argument& argument) {
  std::vector<Source> result;
  std::visit(
      Overloaded{
          []<class Element>(const std::vector<std::vector<Element>>&) {
            throw RefusedNode("takes a list of lists");
          },
          [&](const std::vector<bool>& flags) {
            for (const bool flag : flags) {
              result.push_back(constant(flag));
            }
          },
          [&]<class Element>(const std::vector<Element>& values) {
            for (const Element& value : values) {
              result.push_back(source({value}));
            }
          },
          [&](const auto&) { result.push_back(source(argument)); }},
      argument.value);
  return result;
}

Operand Arguments::list_of(Operand::Form form, std::vector<Source> elements) {
  const auto is_constant = [](const Source& source) {
    return source.from == Source::From::Constant;
  };
  if (!std::all_of(elements.begin(), elements.end(), is_constant)) {
    return {.form = form, .source = {}, .elements = std::move(elements)};
  }
  std::vector<IValue> values;
  for (const Source& element : elements) {
    values.push_back(code_.constants[element.index]);
  }
  return {
      .form = Operand::Form::Value,
      .source = constant(make_list(form, std::move(values))),
      .elements = {}};
}

Operand Arguments::list(const Argument& argument, const c10::Argument& formal) {
  const auto type = given_type(formal.type())->castRaw<c10::ListType>();
  std::vector<Source> values = elements(argument);
  if (!is_list(argument) && formal.N()) { // kernel_size=3 means [3, 3]
    values.resize(static_cast<size_t>(*formal.N()), values.front());
  }
  return list_of(list_form(type->getElementType()), std::move(values));
}

Operand Arguments::operand(
    const Argument& argument,
    const c10::Argument& formal) {
  if (std::holds_alternative<None>(argument.value)) {
    return {
        .form = Operand::Form::Value, .source = constant({}), .elements = {}};
  }
  const c10::TypePtr type = given_type(formal.type());
  if (type->kind() == TypeKind::ListType) {
    return list(argument, formal);
  }
  const Source value = source(argument);
  const auto form = type->kind() == TypeKind::TensorType
      ? Operand::Form::Wrapped
      : type->kind() == TypeKind::FloatType ? Operand::Form::Float
                                            : Operand::Form::Value;
  const bool is_tensor = std::holds_alternative<TensorName>(argument.value) ||
      std::holds_alternative<std::optional<TensorName>>(argument.value);
  if (is_tensor || form == Operand::Form::Value) {
    return {.form = Operand::Form::Value, .source = value, .elements = {}};
  }
  if (value.from != Source::From::Constant) {
    return {.form = form, .source = value, .elements = {}};
  }
  const IValue& number = code_.constants[value.index];
  if (!number.isScalar()) {
    throw RefusedNode(
        "takes a " + number.tagKind() + " where " + type->str() +
        " is expected");
  }
  return {
      .form = Operand::Form::Value,
      .source = constant(
          form == Operand::Form::Wrapped
              ? IValue(wrapped_number(number))
              : IValue(number.toScalar().toDouble())),
      .elements = {}};
}

Operand Arguments::operand(const Argument& argument) {
  if (!is_list(argument)) {
    return {
        .form = Operand::Form::Value,
        .source = source(argument),
        .elements = {}};
  }
  return {
      .form = form_of(argument), .source = {}, .elements = elements(argument)};
}

} // namespace tessera::exported
