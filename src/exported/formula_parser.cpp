#include <algorithm>
#include <cctype>
#include <charconv>
#include <utility>

#include "exported/formula.h"

namespace tessera::exported {
namespace {

/// Deeper expressions are refused: no program that a person wrote has them.
constexpr int kMaxDepth = 200;
/// A sum of many terms nests too, to the left: each term takes a call of
/// evaluate().
constexpr size_t kMaxTokens = 10000;

struct Token {
  enum class Kind : uint8_t { Number, Word, Text, Sign, End };
  Kind kind = Kind::End;
  std::string text;
};

std::vector<Token> tokens_of(std::string_view text) {
  std::vector<Token> tokens;
  size_t at = 0;
  const auto is_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  };
  while (at < text.size()) {
    if (tokens.size() == kMaxTokens) {
      throw UnknownFormula(
          "it has more than " + std::to_string(kMaxTokens) +
          " names, numbers and signs");
    }
    const char c = text[at];
    const size_t begin = at;
    if (std::isspace(static_cast<unsigned char>(c)) != 0) {
      ++at;
    } else if (std::isdigit(static_cast<unsigned char>(c)) != 0) {
      while (at < text.size() &&
             (is_word(text[at]) || text[at] == '.' ||
              ((text[at] == '-' || text[at] == '+') && text[at - 1] == 'e'))) {
        ++at;
      }
      tokens.push_back(
          {Token::Kind::Number, std::string(text.substr(begin, at - begin))});
    } else if (is_word(c)) {
      while (at < text.size() && is_word(text[at])) {
        ++at;
      }
      tokens.push_back(
          {Token::Kind::Word, std::string(text.substr(begin, at - begin))});
    } else if (c == '\'' || c == '"') {
      const size_t end = text.find(c, at + 1);
      if (end == text.npos) {
        throw UnknownFormula("a string does not end");
      }
      tokens.push_back(
          {Token::Kind::Text, std::string(text.substr(at + 1, end - at - 1))});
      at = end + 1;
    } else {
      static constexpr std::string_view kPairs[] = {
          "**", "//", "==", "!=", "<=", ">="};
      const std::string_view two = text.substr(at, 2);
      const bool is_pair =
          std::find(std::begin(kPairs), std::end(kPairs), two) !=
          std::end(kPairs);
      at += is_pair ? 2 : 1;
      tokens.push_back(
          {Token::Kind::Sign, std::string(text.substr(begin, at - begin))});
    }
  }
  tokens.push_back({});
  return tokens;
}

} // namespace

class FormulaParser {
 public:
  FormulaParser(std::string_view text, const FormulaNames& names)
      : tokens_(tokens_of(text)), names_(names) {}

  Formula whole() {
    Formula result = disjunction();
    if (next().kind != Token::Kind::End) {
      throw UnknownFormula("\"" + next().text + "\" is not expected");
    }
    return result;
  }

 private:
  struct Deeper {
    explicit Deeper(int& depth) : depth_(depth) {
      if (++depth_ > kMaxDepth) {
        throw UnknownFormula("it nests too deeply");
      }
    }
    ~Deeper() {
      --depth_;
    }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;
    int& depth_;
  };

  const Token& next() const {
    return tokens_[at_];
  }
  bool is_next(std::string_view text) const {
    return next().text == text && next().kind != Token::Kind::Text;
  }
  bool accept(std::string_view text) {
    if (is_next(text) && next().kind != Token::Kind::End) {
      ++at_;
      return true;
    }
    return false;
  }
  void expect(std::string_view text) {
    if (!accept(text)) {
      throw UnknownFormula(
          "\"" + std::string(text) + "\" is expected before \"" + next().text +
          "\"");
    }
  }
  std::string take(Token::Kind kind, const char* what) {
    if (next().kind != kind) {
      throw UnknownFormula(
          std::string(what) + " is expected before \"" + next().text + "\"");
    }
    return tokens_[at_++].text;
  }

  static Formula number(c10::IValue value) {
    Formula result;
    result.number_ = std::move(value);
    return result;
  }
  static Formula call(const std::string& name, std::vector<Formula> arguments) {
    Formula result;
    result.kind_ = Formula::Kind::Call;
    result.function_ = find_formula_function(name);
    result.arguments_ = std::move(arguments);
    if (result.function_ == nullptr) {
      throw UnknownFormula("the function \"" + name + "\" is not known");
    }
    const size_t needed = needed_arguments(name);
    if (result.arguments_.size() < needed) {
      throw UnknownFormula("\"" + name + "\" has too few arguments");
    }
    return result;
  }
  static Formula call(const std::string& name, Formula left, Formula right) {
    std::vector<Formula> arguments;
    arguments.push_back(std::move(left));
    arguments.push_back(std::move(right));
    return call(name, std::move(arguments));
  }
  static size_t needed_arguments(const std::string& name) {
    static constexpr std::string_view kUnary[] = {
        "Abs",        "abs",        "ToFloat",   "float",
        "int",        "FloorToInt", "CeilToInt", "TruncToInt",
        "RoundToInt", "floor",      "ceiling",   "math.floor",
        "math.ceil",  "math.trunc", "math.sqrt", "OpaqueUnaryFn_sqrt",
        "Identity",   "Not",        "not",       "neg",
        "Add",        "Mul",        "And",       "Or",
        "Max",        "Min",        "max",       "min"};
    if (std::find(std::begin(kUnary), std::end(kUnary), name) !=
        std::end(kUnary)) {
      return 1;
    }
    return name == "Where" || name == "ModularIndexing" ? 3 : 2;
  }

  Formula disjunction() {
    const Deeper deeper(depth_);
    Formula left = conjunction();
    while (is_next("or") || is_next("|")) {
      ++at_;
      left = call("or", std::move(left), conjunction());
    }
    return left;
  }
  Formula conjunction() {
    Formula left = negation();
    while (is_next("and") || is_next("&")) {
      ++at_;
      left = call("and", std::move(left), negation());
    }
    return left;
  }
  Formula negation() {
    const Deeper deeper(depth_);
    if (accept("not") || accept("~")) {
      return call("not", {negation()});
    }
    return comparison();
  }
  Formula comparison() {
    Formula left = sum();
    std::optional<Formula> all;
    while (is_next("==") || is_next("!=") || is_next("<") || is_next("<=") ||
           is_next(">") || is_next(">=")) {
      const std::string sign = tokens_[at_++].text;
      Formula right = sum();
      Formula holds = call(sign, std::move(left), right);
      all = all ? call("and", std::move(*all), std::move(holds))
                : std::move(holds);
      left = std::move(right);
    }
    return all ? std::move(*all) : left;
  }
  Formula sum() {
    Formula left = product();
    while (is_next("+") || is_next("-")) {
      const std::string sign = tokens_[at_++].text;
      left = call(sign, std::move(left), product());
    }
    return left;
  }
  Formula product() {
    Formula left = factor();
    while (is_next("*") || is_next("/") || is_next("//") || is_next("%")) {
      const std::string sign = tokens_[at_++].text;
      left = call(sign, std::move(left), factor());
    }
    return left;
  }
  Formula factor() {
    const Deeper deeper(depth_);
    if (accept("-")) {
      return call("neg", {factor()});
    }
    if (accept("+")) {
      return factor();
    }
    Formula base = atom();
    return accept("**") ? call("**", std::move(base), factor()) : base;
  }

  Formula atom() {
    if (accept("(")) {
      Formula inside = disjunction();
      expect(")");
      return inside;
    }
    if (next().kind == Token::Kind::Number) {
      return number(literal(tokens_[at_++].text));
    }
    std::string word = take(Token::Kind::Word, "a name or a number");
    if (word == "True" || word == "true") {
      return number(true);
    }
    if (word == "False" || word == "false") {
      return number(false);
    }
    if (word == "None") {
      return number({});
    }
    if (word == "L") {
      return input();
    }
    while (word == "math" && accept(".")) {
      word += "." + take(Token::Kind::Word, "a function");
    }
    return accept("(") ? function(word) : symbol(word);
  }

  static c10::IValue literal(const std::string& text) {
    int64_t whole = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, whole);
    if (error == std::errc() && stop == end) {
      return whole;
    }
    double real = 0;
    const auto [real_stop, real_error] =
        std::from_chars(text.data(), end, real);
    if (real_error == std::errc() && real_stop == end) {
      return real;
    }
    throw UnknownFormula("\"" + text + "\" is no number of 64 bits");
  }

  /// Behind `word(`.
  Formula function(const std::string& word) {
    if (word == "Symbol") {
      const std::string name = take(Token::Kind::Text, "a symbol's name");
      skip_keywords();
      return symbol(name);
    }
    if (word == "Float") { // Float('0.5', precision=53)
      const c10::IValue value =
          literal(take(Token::Kind::Text, "a number in quotes"));
      skip_keywords();
      return number(value);
    }
    std::vector<Formula> arguments;
    while (!accept(")")) {
      arguments.push_back(disjunction());
      if (!is_next(")")) {
        expect(",");
      }
    }
    if ((word == "Integer" || word == "S") && arguments.size() == 1) {
      return arguments.front();
    }
    if (word == "Rational" && arguments.size() == 2) {
      return call("/", std::move(arguments));
    }
    if (word == "len" && arguments.size() == 1 &&
        arguments.front().kind_ == Formula::Kind::Dims) {
      return arguments.front();
    }
    return call(word, std::move(arguments));
  }
  void skip_keywords() {
    while (accept(",")) {
      take(Token::Kind::Word, "an assumption");
      expect("=");
      ++at_;
    }
    expect(")");
  }

  Formula symbol(const std::string& name) {
    const auto index = names_.symbol ? names_.symbol(name) : std::nullopt;
    if (!index) {
      throw UnknownFormula("the name \"" + name + "\" is not known");
    }
    Formula result;
    result.kind_ = Formula::Kind::Symbol;
    result.index_ = *index;
    return result;
  }

  /// Behind `L`: ['x']['k'][0].size()[0].
  Formula input() {
    std::string path;
    while (accept("[")) {
      if (next().kind == Token::Kind::Text) {
        const std::string key = tokens_[at_++].text;
        path += path.empty() ? key : "['" + key + "']";
      } else {
        path += "[" + take(Token::Kind::Number, "an index") + "]";
      }
      expect("]");
    }
    const auto index = names_.input ? names_.input(path) : std::nullopt;
    if (!index) {
      throw UnknownFormula("there is no input \"" + path + "\"");
    }
    Formula result;
    result.kind_ = Formula::Kind::Input;
    result.index_ = *index;
    if (accept(".")) {
      property(take(Token::Kind::Word, "a property of a tensor"), result);
    }
    return result;
  }
  void property(const std::string& name, Formula& of) {
    using Kind = Formula::Kind;
    const bool is_call = accept("(");
    if (is_call) {
      expect(")");
    }
    if (name == "storage_offset" && is_call) {
      of.kind_ = Kind::StorageOffset;
      return;
    }
    if (name == "ndim" || (name == "dim" && is_call)) {
      of.kind_ = Kind::Dims;
      return;
    }
    if (name != "size" && name != "shape" && name != "stride") {
      throw UnknownFormula(
          "the property \"" + name + "\" of a tensor is not known");
    }
    if (!is_next("[")) { // len(L['x'].shape)
      of.kind_ = Kind::Dims;
      return;
    }
    expect("[");
    of.kind_ = name == "stride" ? Kind::Stride : Kind::Size;
    const c10::IValue dim = literal(take(Token::Kind::Number, "a dim"));
    if (!dim.isInt()) {
      throw UnknownFormula("a dim is an int");
    }
    of.dim_ = dim.toInt();
    expect("]");
  }

  std::vector<Token> tokens_;
  const FormulaNames& names_;
  size_t at_ = 0;
  int depth_ = 0;
};

Formula Formula::parse(std::string_view text, const FormulaNames& names) {
  return FormulaParser(text, names).whole();
}

} // namespace tessera::exported
