#include <tessera/error.h>
#include <tessera/exported/value.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "exported/node_text.h"

namespace tessera {
namespace {

constexpr const char* kValueCall = "ExportedValue";

[[noreturn]] void refuse_kind(
    const ExportedValue& value,
    std::string_view wanted) {
  raise<c10::TypeError>(
      {.call = kValueCall},
      fmt::format("this is {}, not {}.", value.describe(), wanted));
}

std::string with_quotes(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const std::string& name : names) {
    quoted.push_back('"' + name + '"');
  }
  return fmt::format("{}", fmt::join(quoted, ", "));
}

} // namespace

ExportedValue::ExportedValue(at::Tensor tensor) {
  if (tensor.defined()) {
    value_ = std::move(tensor);
  }
}

ExportedValue::ExportedValue(std::string text) : value_(std::move(text)) {}

ExportedValue::ExportedValue(const char* text) : value_(std::string(text)) {}

ExportedValue ExportedValue::list(std::vector<ExportedValue> elements) {
  ExportedValue result;
  result.value_ = Sequence{std::move(elements), /*is_tuple=*/false};
  return result;
}

ExportedValue ExportedValue::tuple(std::vector<ExportedValue> elements) {
  ExportedValue result;
  result.value_ = Sequence{std::move(elements), /*is_tuple=*/true};
  return result;
}

ExportedValue ExportedValue::dict(std::vector<Item> items) {
  Dictionary dictionary;
  for (Item& item : items) {
    const auto& keys = dictionary.keys;
    if (std::find(keys.begin(), keys.end(), item.first) != keys.end()) {
      raise<c10::ValueError>(
          {.call = kValueCall},
          fmt::format(
              "a dictionary was given the key \"{}\" twice.", item.first));
    }
    dictionary.keys.push_back(std::move(item.first));
    dictionary.values.push_back(std::move(item.second));
  }
  ExportedValue result;
  result.value_ = std::move(dictionary);
  return result;
}

ExportedValue::Kind ExportedValue::kind() const {
  switch (value_.index()) {
    case 0:
      return Kind::None;
    case 1:
      return Kind::Tensor;
    case 2:
      return Kind::Int;
    case 3:
      return Kind::Float;
    case 4:
      return Kind::Bool;
    case 5:
      return Kind::String;
    case 6:
      return std::get<Sequence>(value_).is_tuple ? Kind::Tuple : Kind::List;
    default:
      return Kind::Dict;
  }
}

const at::Tensor& ExportedValue::tensor() const {
  if (const auto* tensor = std::get_if<at::Tensor>(&value_)) {
    return *tensor;
  }
  if (size() == 1) {
    return (*this)[size_t{0}].tensor();
  }
  refuse_kind(*this, "a tensor");
}

int64_t ExportedValue::to_int() const {
  if (const auto* number = std::get_if<int64_t>(&value_)) {
    return *number;
  }
  refuse_kind(*this, "an int");
}

double ExportedValue::to_float() const {
  if (const auto* number = std::get_if<double>(&value_)) {
    return *number;
  }
  if (const auto* number = std::get_if<int64_t>(&value_)) {
    return static_cast<double>(*number);
  }
  refuse_kind(*this, "a float");
}

bool ExportedValue::to_bool() const {
  if (const auto* flag = std::get_if<bool>(&value_)) {
    return *flag;
  }
  refuse_kind(*this, "a bool");
}

const std::string& ExportedValue::to_string() const {
  if (const auto* text = std::get_if<std::string>(&value_)) {
    return *text;
  }
  refuse_kind(*this, "a string");
}

size_t ExportedValue::size() const {
  if (const auto* sequence = std::get_if<Sequence>(&value_)) {
    return sequence->elements.size();
  }
  if (const auto* dictionary = std::get_if<Dictionary>(&value_)) {
    return dictionary->values.size();
  }
  return 0;
}

const ExportedValue& ExportedValue::operator[](size_t index) const {
  if (index >= size()) {
    raise<c10::IndexError>(
        {.call = kValueCall},
        fmt::format("there is no element {} in {}.", index, describe()));
  }
  if (const auto* sequence = std::get_if<Sequence>(&value_)) {
    return sequence->elements[index];
  }
  return std::get<Dictionary>(value_).values[index];
}

const ExportedValue& ExportedValue::operator[](std::string_view key) const {
  if (const auto* dictionary = std::get_if<Dictionary>(&value_)) {
    for (size_t i = 0; i < dictionary->keys.size(); ++i) {
      if (dictionary->keys[i] == key) {
        return dictionary->values[i];
      }
    }
  }
  raise<c10::IndexError>(
      {.call = kValueCall},
      fmt::format("there is no entry \"{}\" in {}.", key, describe()));
}

bool ExportedValue::contains(std::string_view key) const {
  const auto* dictionary = std::get_if<Dictionary>(&value_);
  return dictionary != nullptr &&
      std::find(dictionary->keys.begin(), dictionary->keys.end(), key) !=
      dictionary->keys.end();
}

std::vector<std::string> ExportedValue::keys() const {
  const auto* dictionary = std::get_if<Dictionary>(&value_);
  return dictionary ? dictionary->keys : std::vector<std::string>();
}

std::vector<at::Tensor> ExportedValue::tensors() const {
  if (is_tensor()) {
    return {tensor()};
  }
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < size(); ++i) {
    const auto below = (*this)[i].tensors();
    result.insert(result.end(), below.begin(), below.end());
  }
  return result;
}

std::string ExportedValue::describe() const {
  switch (kind()) {
    case Kind::None:
      return "None";
    case Kind::Tensor: {
      const at::Tensor& held = std::get<at::Tensor>(value_);
      return fmt::format(
          "{} tensor of shape [{}]",
          exported::dtype_text(held.scalar_type()),
          fmt::join(held.sizes(), ", "));
    }
    case Kind::Int:
      return fmt::format("the int {}", to_int());
    case Kind::Float:
      return fmt::format("the float {}", to_float());
    case Kind::Bool:
      return to_bool() ? "True" : "False";
    case Kind::String:
      return fmt::format("the string \"{}\"", to_string());
    case Kind::List:
      return fmt::format("a list of {}", size());
    case Kind::Tuple:
      return fmt::format("a tuple of {}", size());
    case Kind::Dict:
      return size() == 0
          ? "an empty dict"
          : fmt::format("a dict with the keys {}", with_quotes(keys()));
  }
  return "";
}

ExportedArgs& ExportedArgs::add(ExportedValue value) {
  positional_.push_back(std::move(value));
  return *this;
}

ExportedArgs& ExportedArgs::set(std::string name, ExportedValue value) {
  for (const auto& [known, old] : keyword_) {
    if (known == name) {
      raise<c10::ValueError>(
          {.call = "ExportedArgs"},
          fmt::format("the argument \"{}\" was set twice.", name));
    }
  }
  keyword_.emplace_back(std::move(name), std::move(value));
  return *this;
}

} // namespace tessera
