#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gpt {

/// Stands for the tokenizer of a token file where there is none: its text is
/// the numbers of the tokens, "12 55 7".
class TokenNumbers {
 public:
  explicit TokenNumbers(int64_t vocabulary) : vocabulary_(vocabulary) {}

  int64_t vocabulary() const {
    return vocabulary_;
  }
  /// Text without any number is token 0. Throws UsageError for text that is
  /// something else, and for a number that is not a token.
  std::vector<int32_t> encode(std::string_view text) const;
  /// Each number behind a blank. Throws std::out_of_range for a number that is
  /// no token.
  std::string decode(std::span<const int32_t> tokens) const;

 private:
  int64_t vocabulary_;
};

} // namespace gpt
