// Expressions of sizes and inputs, as exported programs write them.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "exported/python_math.h"

namespace tessera::exported {

/// An expression that is not understood; what() says which part of it.
struct UnknownFormula : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What an expression is about, while it is read.
struct FormulaNames {
  /// The number of a symbol ("s77").
  std::function<std::optional<size_t>(const std::string&)> symbol;
  /// The number of an input that a guard names: `x`, `batch['ids'][0]`.
  std::function<std::optional<size_t>(const std::string&)> input;
};

/// What an expression is about, when it is evaluated.
struct FormulaValues {
  std::span<const int64_t> symbols;
  std::span<const c10::IValue> inputs;
};

/// An arithmetic or logical expression in one of the two forms that files have:
/// sympy's "Mul(Integer(2), Symbol('s77', integer=True))" in shapes, and
/// Python's "L['x'].size()[0] <= 2*s77" in guards and ranges.
class Formula {
 public:
  enum class Kind : uint8_t {
    Number,
    Symbol,
    Input, // a number
    Size, // of an input, of one dim
    Stride,
    StorageOffset,
    Dims, // how many dims an input has
    Call,
  };

  /// Throws UnknownFormula.
  static Formula parse(std::string_view text, const FormulaNames& names);

  c10::IValue evaluate(const FormulaValues& values) const;

  Kind kind() const {
    return kind_;
  }
  /// Of a Symbol or an Input.
  size_t index() const {
    return index_;
  }
  /// The symbol `s` and the numbers a and b if this is a*s + b with a != 0.
  struct Linear {
    size_t symbol = 0;
    int64_t factor = 1;
    int64_t offset = 0;
  };
  std::optional<Linear> linear() const;

 private:
  friend class FormulaParser;

  std::optional<Linear> try_linear() const;
  void collect_symbols(std::vector<size_t>& symbols) const;

  Kind kind_ = Kind::Number;
  c10::IValue number_;
  size_t index_ = 0;
  int64_t dim_ = 0;
  PythonFunction function_ = nullptr;
  std::vector<Formula> arguments_;
};

} // namespace tessera::exported
