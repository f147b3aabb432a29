#include "added_tokens.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "unicode/characters.h"

namespace gpt {
namespace {

size_t end_of_spaces(std::string_view text, size_t at) {
  while (at < text.size()) {
    const auto character = character_at(text, at);
    if (character.kind != CharacterClass::Space) {
      break;
    }
    at += character.bytes;
  }
  return at;
}

/// Where the spaces that end at `at` begin, not before `least`.
size_t begin_of_spaces(std::string_view text, size_t at, size_t least) {
  while (at > least) {
    size_t begin = at - 1;
    while (begin > least &&
           (static_cast<unsigned char>(text[begin]) & 0xc0U) == 0x80) {
      --begin; // into the middle of a character
    }
    const auto character = character_at(text, begin);
    if (character.kind != CharacterClass::Space ||
        begin + character.bytes != at) {
      break;
    }
    at = begin;
  }
  return at;
}

} // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) {
    return a.content < b.content;
  });
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const auto& content = tokens_[i].content;
    if (content.empty()) {
      throw std::runtime_error("added_tokens has a token without content");
    }
    if (i > 0 && content == tokens_[i - 1].content) {
      throw std::runtime_error("added_tokens has \"" + content + "\" twice");
    }
    begins_[static_cast<unsigned char>(content.front())] = true;
  }
}

/// Narrows the sorted tokens down, byte by byte, to those that begin like the
/// text.
const AddedToken* AddedTokens::longest_at(std::string_view text, size_t at)
    const {
  const AddedToken* longest = nullptr;
  auto first = tokens_.begin();
  auto last = tokens_.end();
  for (size_t depth = 0; at + depth < text.size(); ++depth) {
    const auto byte = static_cast<unsigned char>(text[at + depth]);
    const auto byte_of = [depth](const AddedToken& token) {
      return depth < token.content.size()
          ? static_cast<int>(static_cast<unsigned char>(token.content[depth]))
          : -1; // shorter ones come first
    };
    first = std::partition_point(first, last, [&](const AddedToken& token) {
      return byte_of(token) < static_cast<int>(byte);
    });
    last = std::partition_point(first, last, [&](const AddedToken& token) {
      return byte_of(token) == static_cast<int>(byte);
    });
    if (first == last) {
      break;
    }
    if (first->content.size() == depth + 1) {
      longest = &*first;
    }
  }
  return longest;
}

std::vector<AddedTokens::Part> AddedTokens::split(std::string_view text) const {
  std::vector<Part> parts;
  size_t done = 0;
  const auto add_between = [&](size_t end) {
    if (done < end) {
      parts.push_back({.text = text.substr(done, end - done), .id = -1});
    }
  };
  for (size_t at = 0; at < text.size() && !tokens_.empty();) {
    const AddedToken* token = begins_[static_cast<unsigned char>(text[at])]
        ? longest_at(text, at)
        : nullptr;
    if (token == nullptr) {
      ++at;
      continue;
    }
    const size_t begin =
        token->takes_spaces_before ? begin_of_spaces(text, at, done) : at;
    at += token->content.size();
    const size_t end = token->takes_spaces_after ? end_of_spaces(text, at) : at;
    add_between(begin);
    parts.push_back({.text = text.substr(begin, end - begin), .id = token->id});
    done = end;
  }
  add_between(text.size());
  return parts;
}

} // namespace gpt
