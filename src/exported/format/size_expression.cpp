#include "exported/format/size_expression.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <string_view>
#include <vector>

#include "checkpoint/format/format_error.h"

namespace tessera::exported {
namespace {

/// Deeper expressions are refused: no program that a person wrote has them.
constexpr int kMaxDepth = 200;
constexpr int64_t kMaxExponent = 64;

int64_t sum(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) {
    throw UnknownSize("a size does not fit 64 bits");
  }
  return result;
}

int64_t product(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    throw UnknownSize("a size does not fit 64 bits");
  }
  return result;
}

/// Rounds down, as Python does.
int64_t quotient(int64_t a, int64_t b) {
  if (b <= 0) {
    throw UnknownSize("a size is divided by " + std::to_string(b));
  }
  return a / b - (a % b < 0 ? 1 : 0);
}

int64_t power(int64_t base, int64_t exponent) {
  if (exponent < 0 || exponent > kMaxExponent) {
    throw UnknownSize("a size has the exponent " + std::to_string(exponent));
  }
  int64_t result = 1;
  for (int64_t i = 0; i < exponent; ++i) {
    result = product(result, base);
  }
  return result;
}

/// Reads "Add(Integer(1), Symbol('s0', integer=True))" and computes it.
class SizeReader {
 public:
  SizeReader(std::string_view text, const SymbolValues& symbols)
      : text_(text), symbols_(symbols) {}

  int64_t read_all() {
    const int64_t result = read(0);
    if (at_ != text_.size()) {
      refuse();
    }
    return result;
  }

 private:
  [[noreturn]] void refuse() const {
    throw UnknownSize(
        "the expression " + format::in_quotes(text_) + " is not understood");
  }

  bool take(std::string_view sign) {
    while (at_ < text_.size() && text_[at_] == ' ') {
      ++at_;
    }
    if (!text_.substr(at_).starts_with(sign)) {
      return false;
    }
    at_ += sign.size();
    return true;
  }

  std::string_view take_word() {
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 ||
            text_[at_] == '_' || text_[at_] == '-')) {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  int64_t number_of(std::string_view word) const {
    int64_t number = 0;
    const char* end = word.data() + word.size();
    const auto [stop, error] = std::from_chars(word.data(), end, number);
    if (error != std::errc() || stop != end) {
      refuse();
    }
    return number;
  }

  int64_t read(int depth) {
    if (depth > kMaxDepth) {
      throw UnknownSize("an expression of sizes is nested too deeply");
    }
    take("");
    const std::string_view word = take_word();
    if (!take("(")) {
      return number_of(word);
    }
    if (word == "Symbol") {
      return read_symbol();
    }
    std::vector<int64_t> operands;
    do {
      operands.push_back(read(depth + 1));
    } while (take(","));
    if (!take(")")) {
      refuse();
    }
    return call(word, operands);
  }

  /// What follows "Symbol(".
  int64_t read_symbol() {
    if (!take("'")) {
      refuse();
    }
    const std::string name(take_word());
    const size_t end = text_.find(')', at_);
    if (end == text_.npos) {
      refuse();
    }
    at_ = end + 1; // what is assumed of the symbol
    const auto found = symbols_.find(name);
    if (found == symbols_.end()) {
      throw UnknownSize("a size depends on " + name + ", which is not known");
    }
    return found->second;
  }

  int64_t call(std::string_view name, const std::vector<int64_t>& operands) {
    const auto fold = [&](const auto& combine) {
      int64_t result = operands.front();
      for (size_t i = 1; i < operands.size(); ++i) {
        result = combine(result, operands[i]);
      }
      return result;
    };
    if (name == "Add") {
      return fold(sum);
    }
    if (name == "Mul") {
      return fold(product);
    }
    if (name == "Max") {
      return *std::max_element(operands.begin(), operands.end());
    }
    if (name == "Min") {
      return *std::min_element(operands.begin(), operands.end());
    }
    if (operands.size() == 1 && (name == "Integer" || name == "Identity")) {
      return operands[0];
    }
    if (operands.size() == 2) {
      return call(name, operands[0], operands[1]);
    }
    refuse();
  }

  int64_t call(std::string_view name, int64_t a, int64_t b) {
    if (name == "FloorDiv" || name == "CleanDiv") {
      return quotient(a, b);
    }
    if (name == "Mod" || name == "PythonMod") {
      return a - product(quotient(a, b), b);
    }
    if (name == "Pow" || name == "PowByNatural") {
      return power(a, b);
    }
    refuse();
  }

  std::string_view text_;
  const SymbolValues& symbols_;
  size_t at_ = 0;
};

} // namespace

int64_t evaluate(const Expression<int64_t>& size, const SymbolValues& symbols) {
  if (const auto* number = std::get_if<int64_t>(&size.value)) {
    return *number;
  }
  return SizeReader(std::get<std::string>(size.value), symbols).read_all();
}

std::optional<std::string> symbol_of(const Expression<int64_t>& size) {
  constexpr std::string_view kBegin = "Symbol('";
  const auto* text = std::get_if<std::string>(&size.value);
  if (text == nullptr || !text->starts_with(kBegin)) {
    return std::nullopt;
  }
  const size_t end = text->find('\'', kBegin.size());
  if (end == text->npos || text->find('(', kBegin.size()) != text->npos) {
    return std::nullopt;
  }
  return text->substr(kBegin.size(), end - kBegin.size());
}

} // namespace tessera::exported
