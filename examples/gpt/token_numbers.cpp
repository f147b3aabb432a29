#include "token_numbers.h"

#include <charconv>
#include <sstream>
#include <stdexcept>

#include "settings.h"

namespace gpt {

std::vector<int32_t> TokenNumbers::encode(std::string_view text) const {
  std::vector<int32_t> tokens;
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    int32_t token = 0;
    const char* end = word.data() + word.size();
    const auto result = std::from_chars(word.data(), end, token);
    if (result.ec != std::errc() || result.ptr != end || token < 0 ||
        token >= vocabulary_) {
      throw UsageError(
          "--prompt takes numbers of tokens from 0 to " +
          std::to_string(vocabulary_ - 1) +
          ", as in \"12 55 7\", since the run has no tokenizer; \"" + word +
          "\" is none.");
    }
    tokens.push_back(token);
  }
  return tokens.empty() ? std::vector<int32_t>{0} : tokens;
}

std::string TokenNumbers::decode(std::span<const int32_t> tokens) const {
  std::string text;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocabulary_) {
      throw std::out_of_range(
          "there is no token " + std::to_string(token) + ".");
    }
    text += " " + std::to_string(token);
  }
  return text;
}

} // namespace gpt
