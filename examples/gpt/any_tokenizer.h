#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "json_tokenizer.h"
#include "token_numbers.h"
#include "tokenizer.h"

namespace gpt {

/// The tokenizer of a corpus: learned from its text, a tokenizer.json, or
/// numbers in place of text. One thread at a time may use it.
class AnyTokenizer {
 public:
  AnyTokenizer(Tokenizer learned) : tokenizer_(std::move(learned)) {}
  AnyTokenizer(JsonTokenizer read) : tokenizer_(std::move(read)) {}
  AnyTokenizer(TokenNumbers numbers) : tokenizer_(numbers) {}

  int64_t vocabulary() const {
    return std::visit([](const auto& t) { return t.vocabulary(); }, tokenizer_);
  }
  std::vector<int32_t> encode(std::string_view text) {
    return std::visit([&](auto& t) { return t.encode(text); }, tokenizer_);
  }
  /// Throws std::out_of_range for a token that does not exist.
  std::string decode(std::span<const int32_t> tokens) const {
    return std::visit(
        [&](const auto& t) { return t.decode(tokens); }, tokenizer_);
  }

 private:
  std::variant<Tokenizer, JsonTokenizer, TokenNumbers> tokenizer_;
};

} // namespace gpt
