#include "exported/code.h"

#include <tessera/error.h>

#include <ATen/ops/scalar_tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <optional>
#include <utility>

#include "exported/node_text.h"
#include "exported/python_math.h"

namespace tessera::exported {

using c10::IValue;

at::Tensor wrapped_number(const IValue& number) {
  const auto dtype = number.isInt() ? at::kLong
      : number.isBool()             ? at::kBool
      : number.isDouble()           ? at::kDouble
                                    : at::kComplexDouble;
  at::Tensor result = at::scalar_tensor(
      number.toScalar(), at::TensorOptions(dtype).device(at::kCPU));
  result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

namespace {

at::Tensor tensor_or_wrapped(const IValue& value) {
  return value.isTensor() ? value.toTensor()
      : value.isNone()    ? at::Tensor()
                          : wrapped_number(value);
}

template <class Element, class Convert>
IValue list_of(const std::vector<IValue>& values, Convert convert) {
  c10::List<Element> list;
  list.reserve(values.size());
  for (const IValue& value : values) {
    list.push_back(convert(value));
  }
  return list;
}

} // namespace

IValue make_list(Operand::Form form, std::vector<IValue> elements) {
  switch (form) {
    case Operand::Form::Tensors:
      return list_of<at::Tensor>(elements, tensor_or_wrapped);
    case Operand::Form::OptionalTensors:
      return list_of<std::optional<at::Tensor>>(
          elements, [](const IValue& value) -> std::optional<at::Tensor> {
            return value.isNone() ? std::nullopt
                                  : std::optional(tensor_or_wrapped(value));
          });
    case Operand::Form::Ints:
      return list_of<int64_t>(elements, [](const IValue& value) {
        return value.isBool() ? int64_t{value.toBool()} : value.toInt();
      });
    case Operand::Form::Floats:
      return list_of<double>(elements, as_float);
    case Operand::Form::Bools:
      return list_of<bool>(elements, as_bool);
    case Operand::Form::Strings:
      return list_of<std::string>(
          elements, [](const IValue& value) { return value.toStringRef(); });
    default: {
      c10::impl::GenericList list(c10::NumberType::get());
      for (IValue& element : elements) {
        list.push_back(std::move(element));
      }
      return list;
    }
  }
}

IValue Frame::take_converted(const Operand& operand) {
  switch (operand.form) {
    case Operand::Form::Wrapped: {
      IValue value = take(operand.source);
      return value.isTensor() || value.isNone() ? std::move(value)
                                                : wrapped_number(value);
    }
    case Operand::Form::Float: {
      const IValue value = take(operand.source);
      return value.isNone() ? value : IValue(as_float(value));
    }
    default: {
      std::vector<IValue> elements;
      elements.reserve(operand.elements.size());
      for (const Source& element : operand.elements) {
        elements.push_back(take(element));
      }
      return make_list(operand.form, std::move(elements));
    }
  }
}

std::vector<IValue> Frame::take_all(std::span<const Operand> operands) {
  std::vector<IValue> values;
  for (const Operand& operand : operands) {
    if (operand.form < Operand::Form::Tensors) {
      values.push_back(take(operand));
    } else {
      for (const Source& element : operand.elements) {
        values.push_back(take(element));
      }
    }
  }
  return values;
}

void Frame::set_elements(const Result& result, const IValue& list) {
  const auto elements = list.toListRef();
  TORCH_CHECK(
      elements.size() == result.slots.size(),
      "it gave a list of ",
      elements.size(),
      " values, but at export it gave ",
      result.slots.size(),
      ". Export the model with this size, or with a dynamic one.");
  for (size_t i = 0; i < elements.size(); ++i) {
    set(result.slots[i], elements[i]);
  }
}

void Frame::set_all(
    std::span<const Result> results,
    std::vector<IValue> values) {
  size_t next = 0;
  for (const Result& result : results) {
    for (const int32_t slot : result.slots) {
      TESSERA_INTERNAL_ASSERT(next < values.size(), "a nested graph's results");
      set(slot, std::move(values[next++]));
    }
  }
}

std::vector<IValue> run(
    const Code& code,
    const RunScope& scope,
    std::vector<IValue> inputs) {
  Frame frame(code, scope);
  for (size_t i = 0; i < code.inputs.size(); ++i) {
    frame.set(code.inputs[i], std::move(inputs[i]));
  }
  inputs.clear();
  const Step* current = nullptr;
  try {
    for (const auto& step : code.steps) {
      current = step.get();
      step->run(frame);
    }
  } catch (c10::Error& error) {
    if (current->node != nullptr) {
      error.add_context(describe_node(*current->node));
    }
    throw;
  }
  return frame.take_all(code.outputs);
}

} // namespace tessera::exported
