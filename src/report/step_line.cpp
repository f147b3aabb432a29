#include "report/step_line.h"

#include <charconv>

#include "report/bounds.h"

namespace tessera::report {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// Walks over a line. Every function returns whether it found what it expected;
/// after the first false the line is abandoned.
class Scanner {
 public:
  explicit Scanner(std::string_view text)
      : at_(text.data()), end_(text.data() + text.size()) {}

  bool take(char wanted) {
    skip_space();
    if (at_ == end_ || *at_ != wanted) {
      return false;
    }
    ++at_;
    return true;
  }

  bool sees(char wanted) {
    skip_space();
    return at_ != end_ && *at_ == wanted;
  }

  bool is_at_end() {
    skip_space();
    return at_ == end_;
  }

  /// Text of printable ASCII without escapes.
  bool string(std::string_view* value) {
    if (!take('"')) {
      return false;
    }
    const char* begin = at_;
    while (at_ != end_ && *at_ != '"') {
      if (*at_ < ' ' || *at_ > '~' || *at_ == '\\') {
        return false;
      }
      ++at_;
    }
    *value = std::string_view(begin, at_ - begin);
    return take('"');
  }

  bool null() {
    skip_space();
    constexpr std::string_view kNull = "null";
    if (std::string_view(at_, end_ - at_).substr(0, kNull.size()) != kNull) {
      return false;
    }
    at_ += kNull.size();
    return true;
  }

  /// A number as JSON spells it; `is_whole` if it has digits only.
  bool number(double* value, bool* is_whole) {
    skip_space();
    const char* begin = at_;
    skip('-');
    const char* digits = at_;
    if (!skip_digits() || (*digits == '0' && at_ - digits > 1)) {
      return false;
    }
    *is_whole = digits == begin;
    if (skip('.')) {
      *is_whole = false;
      if (!skip_digits()) {
        return false;
      }
    }
    if (skip('e') || skip('E')) {
      *is_whole = false;
      if (!skip('+')) {
        skip('-');
      }
      if (!skip_digits()) {
        return false;
      }
    }
    const auto result = std::from_chars(begin, at_, *value);
    return result.ec == std::errc() && result.ptr == at_;
  }

 private:
  void skip_space() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) {
      ++at_;
    }
  }
  bool skip(char c) {
    if (at_ == end_ || *at_ != c) {
      return false;
    }
    ++at_;
    return true;
  }
  bool skip_digits() {
    const char* begin = at_;
    while (at_ != end_ && is_digit(*at_)) {
      ++at_;
    }
    return at_ != begin;
  }

  const char* at_;
  const char* end_;
};

bool is_within(double value, double max) {
  return value >= 0 && value <= max;
}

class PlainStep {
 public:
  explicit PlainStep(std::string_view text) : scanner_(text) {}

  bool read() {
    return read_members([this](auto key) { return member(key); }) &&
        scanner_.is_at_end() && is_step_ && has_step_;
  }

  LogLine take() const {
    return {.time = time_, .content = step_};
  }

 private:
  template <class Member>
  bool read_members(const Member& read_member) {
    if (!scanner_.take('{')) {
      return false;
    }
    if (scanner_.take('}')) {
      return true;
    }
    std::string_view key;
    do {
      if (!scanner_.string(&key) || !scanner_.take(':') || !read_member(key)) {
        return false;
      }
    } while (scanner_.take(','));
    return scanner_.take('}');
  }

  bool member(std::string_view key) {
    if (scanner_.sees('n')) {
      return key != "kind" && scanner_.null();
    }
    if (scanner_.sees('"')) {
      std::string_view value;
      return scanner_.string(&value) && take_text(key, value);
    }
    if (scanner_.sees('{')) {
      step_.has |= Step::kMemory;
      return key == "memory" &&
          read_members([this](auto kind) { return memory(kind); });
    }
    double value = 0;
    bool is_whole = false;
    return scanner_.number(&value, &is_whole) &&
        take_number(key, value, is_whole);
  }

  bool memory(std::string_view kind) {
    double value = 0;
    bool is_whole = false;
    if (!scanner_.number(&value, &is_whole)) {
      return false;
    }
    for (size_t i = 0; i < kMemoryKinds.size(); ++i) {
      if (kind == kMemoryKinds[i]) {
        step_.memory[i] = value;
        return is_within(value, kMaxCount);
      }
    }
    return true;
  }

  bool take_text(std::string_view key, std::string_view value) {
    if (key == "kind") {
      is_step_ = value == "step";
      return is_step_;
    }
    const auto named = named_number(value);
    if (key == "loss" || key == "lr" || key == "grad_norm") {
      return named && take_number(key, *named, /*is_whole=*/false);
    }
    return key != "step" && key != "time" && key != "tokens" &&
        key != "seconds" && key != "memory" && key != "skipped";
  }

  bool take_number(std::string_view key, double value, bool is_whole) {
    if (key == "loss") {
      return set(&step_.loss, value, Step::kLoss);
    }
    if (key == "lr") {
      return set(&step_.lr, value, Step::kLr);
    }
    if (key == "grad_norm") {
      return set(&step_.grad_norm, value, Step::kGradNorm);
    }
    if (key == "tokens") {
      return set(&step_.tokens, value, Step::kTokens) &&
          is_within(value, kMaxCount);
    }
    if (key == "seconds") {
      return set(&step_.seconds, value, Step::kSeconds) &&
          is_within(value, kMaxStepSeconds);
    }
    if (key == "time") {
      time_ = value;
      return is_within(value, kMaxTime);
    }
    if (key == "step") {
      has_step_ = is_whole && is_within(value, kMaxCount);
      step_.step = has_step_ ? static_cast<int64_t>(value) : 0;
      return has_step_;
    }
    return key != "kind" && key != "memory" && key != "skipped";
  }

  bool set(double* place, double value, Step::Field field) {
    *place = value;
    step_.has |= field;
    return true;
  }

  Scanner scanner_;
  Step step_;
  std::optional<double> time_;
  bool is_step_ = false;
  bool has_step_ = false;
};

} // namespace

std::optional<LogLine> parse_plain_step(std::string_view text) {
  PlainStep step(text);
  return step.read() ? std::optional(step.take()) : std::nullopt;
}

} // namespace tessera::report
