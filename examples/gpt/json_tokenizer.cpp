#include "json_tokenizer.h"

#include <fstream>
#include <stdexcept>
#include <utility>

#include "tokenizer_reader.h"
#include "unicode/nfc.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

/// The largest that are known have 33 MB.
constexpr uintmax_t kMaxFileBytes = uintmax_t{128} << 20;

/// What is looked for in normalized text is normalized too.
std::vector<AddedToken> normalized(std::vector<AddedToken> tokens) {
  for (AddedToken& token : tokens) {
    token.content = to_nfc(token.content);
  }
  return tokens;
}

} // namespace

JsonTokenizer::JsonTokenizer(TokenizerParts parts, std::string name)
    : parts_(std::move(parts)),
      name_(std::move(name)),
      added_(std::move(parts_.added)),
      added_to_normal_(
          parts_.to_nfc ? normalized(std::move(parts_.added_to_normal))
                        : std::move(parts_.added_to_normal)),
      model_(std::exchange(parts_.model, {})) {}

std::string JsonTokenizer::text_of(const fs::path& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (error) {
    throw std::runtime_error(
        "cannot read the tokenizer \"" + path.string() +
        "\": " + error.message() + ".");
  }
  if (size > kMaxFileBytes) {
    throw std::runtime_error(
        "\"" + path.string() + "\" has " + std::to_string(size) +
        " bytes; a tokenizer.json has at most " +
        std::to_string(kMaxFileBytes) + ".");
  }
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(size))) {
    throw std::runtime_error(
        "cannot read the tokenizer \"" + path.string() + "\".");
  }
  return text;
}

JsonTokenizer JsonTokenizer::read(const fs::path& path) {
  return parse(text_of(path), path.string());
}

JsonTokenizer JsonTokenizer::parse(
    std::string_view text,
    const std::string& name) {
  try {
    return {read_tokenizer_parts(text), name};
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(
        "\"" + name +
        "\" is not a tokenizer.json that is supported: " + error.what() + ".");
  }
}

int64_t JsonTokenizer::vocabulary() const {
  return std::ssize(parts_.bytes_of);
}

std::vector<int32_t> JsonTokenizer::encode(
    std::string_view text,
    TextEnds ends) {
  std::vector<int32_t> tokens;
  if (ends == TextEnds::Marked) {
    tokens = parts_.before;
  }
  try {
    for (const auto& part : added_.split(text)) {
      if (part.id >= 0) {
        tokens.push_back(part.id);
      } else if (parts_.to_nfc) {
        encode_normal(gpt::to_nfc(part.text), tokens);
      } else {
        encode_normal(part.text, tokens);
      }
    }
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("\"" + name_ + "\": " + error.what());
  }
  if (ends == TextEnds::Marked) {
    tokens.insert(tokens.end(), parts_.after.begin(), parts_.after.end());
  }
  return tokens;
}

void JsonTokenizer::encode_normal(
    std::string_view text,
    std::vector<int32_t>& tokens) {
  for (const auto& part : added_to_normal_.split(text)) {
    if (part.id >= 0) {
      tokens.push_back(part.id);
    } else {
      encode_words(part.text, 0, tokens);
    }
  }
}

/// Cuts the text by one pattern after another, then encodes the words.
void JsonTokenizer::encode_words(
    std::string_view text,
    size_t step,
    std::vector<int32_t>& tokens) {
  const auto cut = [&](const WordPattern& pattern, const auto& use) {
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = pattern.end_of_word(text, begin);
      use(text.substr(begin, end - begin));
      begin = end;
    }
  };
  if (step < parts_.splits.size()) {
    cut(*parts_.splits[step],
        [&](std::string_view word) { encode_words(word, step + 1, tokens); });
    return;
  }
  std::string spaced;
  if (parts_.adds_space && !text.starts_with(' ')) {
    spaced = " " + std::string(text);
    text = spaced;
  }
  if (!parts_.splits_like_gpt2) {
    model_.encode(text, tokens);
    return;
  }
  cut(WordPattern::gpt2(),
      [&](std::string_view word) { model_.encode(word, tokens); });
}

std::string JsonTokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocabulary()) {
      throw std::out_of_range(
          "token " + std::to_string(token) + " is not among " +
          std::to_string(vocabulary()));
    }
    text += parts_.bytes_of[static_cast<size_t>(token)];
  }
  return text;
}

} // namespace gpt
