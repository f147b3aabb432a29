#include "exported/formula.h"

#include <algorithm>

namespace tessera::exported {

c10::IValue Formula::evaluate(const FormulaValues& values) const {
  const auto tensor = [&]() -> const at::Tensor& {
    return values.inputs[index_].toTensor();
  };
  switch (kind_) {
    case Kind::Number:
      return number_;
    case Kind::Symbol:
      return values.symbols[index_];
    case Kind::Input:
      return values.inputs[index_];
    case Kind::Size:
      return tensor().size(dim_);
    case Kind::Stride:
      return tensor().stride(dim_);
    case Kind::StorageOffset:
      return tensor().storage_offset();
    case Kind::Dims:
      return tensor().dim();
    case Kind::Call:
      break;
  }
  std::vector<c10::IValue> arguments;
  arguments.reserve(arguments_.size());
  for (const Formula& argument : arguments_) {
    arguments.push_back(argument.evaluate(values));
  }
  return function_(arguments);
}

void Formula::collect_symbols(std::vector<size_t>& symbols) const {
  if (kind_ == Kind::Symbol) {
    symbols.push_back(index_);
  }
  for (const Formula& argument : arguments_) {
    argument.collect_symbols(symbols);
  }
}

std::optional<Formula::Linear> Formula::linear() const {
  try {
    return try_linear();
  } catch (const c10::Error&) { // too large for 64 bits
    return std::nullopt;
  }
}

/// Two values tell a and b, others that it is linear.
std::optional<Formula::Linear> Formula::try_linear() const {
  std::vector<size_t> symbols;
  collect_symbols(symbols);
  if (symbols.empty() ||
      std::any_of(symbols.begin(), symbols.end(), [&](size_t symbol) {
        return symbol != symbols.front();
      })) {
    return std::nullopt;
  }
  std::vector<int64_t> trial(symbols.front() + 1);
  const auto at = [&](int64_t value) {
    trial.back() = value;
    return evaluate({.symbols = trial, .inputs = {}});
  };
  const c10::IValue first = at(10000);
  const c10::IValue second = at(10001);
  if (!first.isInt() || !second.isInt()) {
    return std::nullopt;
  }
  Linear result{
      .symbol = symbols.front(),
      .factor = checked_sub(second.toInt(), first.toInt()),
      .offset = 0};
  result.offset = checked_sub(first.toInt(), checked_mul(result.factor, 10000));
  const auto agrees = [&](int64_t value) {
    const c10::IValue found = at(value);
    return found.isInt() &&
        found.toInt() ==
        checked_add(checked_mul(result.factor, value), result.offset);
  };
  const bool is_linear = result.factor != 0 && agrees(7) && agrees(123456) &&
      agrees(3) && agrees(10002) && agrees(10007);
  return is_linear ? std::optional(result) : std::nullopt;
}

} // namespace tessera::exported
