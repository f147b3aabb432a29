#pragma once

#include <tessera/api.h>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

/// A Python value that an exported model takes or returns: None, a tensor, an
/// int, a float, a bool, a string, or a list, tuple or dictionary of values.
/// (c10::IValue would need a type for each list and dictionary, and a cast for
/// each element.)
///
///   at::Tensor logits = model->forward(args)["logits"].tensor();
///
/// Copies share their tensors.
class TESSERA_API ExportedValue {
 public:
  /// The kinds of values; a named tuple, and a class that Python registered
  /// with its field names, is a Dict.
  enum class Kind { None, Tensor, Int, Float, Bool, String, List, Tuple, Dict };
  /// An entry of a dictionary.
  using Item = std::pair<std::string, ExportedValue>;

  /// None.
  ExportedValue() = default;
  /// A tensor; an undefined one is None.
  ExportedValue(at::Tensor tensor);
  /// A bool, an int or a float, by the argument's type.
  template <class Number>
  requires std::integral<Number> || std::floating_point<Number> ExportedValue(
      Number number) {
    if constexpr (std::same_as<Number, bool>) {
      value_ = number;
    } else if constexpr (std::integral<Number>) {
      value_ = static_cast<int64_t>(number);
    } else {
      value_ = static_cast<double>(number);
    }
  }
  /// A string.
  ExportedValue(std::string text);
  ExportedValue(const char* text);

  /// A list, a tuple, a dictionary; keys of a dictionary must differ.
  static ExportedValue list(std::vector<ExportedValue> elements);
  static ExportedValue tuple(std::vector<ExportedValue> elements);
  static ExportedValue dict(std::vector<Item> items);

  /// What this is.
  Kind kind() const;
  bool is_none() const {
    return kind() == Kind::None;
  }
  bool is_tensor() const {
    return kind() == Kind::Tensor;
  }

  /// The tensor, number or text. Each throws c10::TypeError if this is
  /// something else; to_float() accepts an int. tensor() also accepts a list,
  /// tuple or dictionary with one element, which holds the tensor.
  const at::Tensor& tensor() const;
  int64_t to_int() const;
  double to_float() const;
  bool to_bool() const;
  const std::string& to_string() const;

  /// How many elements a list, tuple or dictionary has; 0 for other kinds.
  size_t size() const;
  /// An element of a list or tuple, or the value of a dictionary's entry by its
  /// position. Throws c10::IndexError.
  const ExportedValue& operator[](size_t index) const;
  const ExportedValue& operator[](int index) const {
    return (*this)[static_cast<size_t>(index)];
  }
  /// The entry of a dictionary. Throws c10::IndexError, with the keys that
  /// there are.
  const ExportedValue& operator[](std::string_view key) const;
  const ExportedValue& operator[](const char* key) const {
    return (*this)[std::string_view(key)];
  }
  const ExportedValue& operator[](const std::string& key) const {
    return (*this)[std::string_view(key)];
  }
  /// Whether a dictionary has an entry.
  bool contains(std::string_view key) const;
  /// The keys of a dictionary, in order; empty for other kinds.
  std::vector<std::string> keys() const;

  /// All tensors in this value, in order.
  std::vector<at::Tensor> tensors() const;
  /// The value in words, for messages: "a dict with the keys "x" and "y"".
  std::string describe() const;

 private:
  struct Sequence {
    std::vector<ExportedValue> elements;
    bool is_tuple = false;
  };
  struct Dictionary {
    std::vector<std::string> keys;
    std::vector<ExportedValue> values;
  };
  std::variant<
      std::monostate,
      at::Tensor,
      int64_t,
      double,
      bool,
      std::string,
      Sequence,
      Dictionary>
      value_;
};

/// What forward() of an exported model is called with, as in Python: positional
/// arguments, then keyword arguments.
///
///   model->forward(ExportedArgs{ids}.set("attention_mask", mask));
class TESSERA_API ExportedArgs {
 public:
  /// No arguments.
  ExportedArgs() = default;
  /// Positional arguments.
  ExportedArgs(std::initializer_list<ExportedValue> positional)
      : positional_(positional) {}
  explicit ExportedArgs(std::vector<ExportedValue> positional)
      : positional_(std::move(positional)) {}

  /// Appends a positional argument.
  ExportedArgs& add(ExportedValue value);
  /// Sets a keyword argument. A positional argument may be given by its name,
  /// too.
  ExportedArgs& set(std::string name, ExportedValue value);

  /// What was given.
  const std::vector<ExportedValue>& positional() const {
    return positional_;
  }
  const std::vector<ExportedValue::Item>& keyword() const {
    return keyword_;
  }

 private:
  std::vector<ExportedValue> positional_;
  std::vector<ExportedValue::Item> keyword_;
};

} // namespace tessera
