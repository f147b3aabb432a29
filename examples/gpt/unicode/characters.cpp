#include "characters.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace gpt {
namespace {

#include "classes.inc"

constexpr size_t kAscii = 128;

CharacterClass looked_up(char32_t code) {
  const auto* after = std::upper_bound(
      std::begin(kClassRanges), std::end(kClassRanges), (code << 3) | 7U);
  return static_cast<CharacterClass>(*std::prev(after) & 7U);
}

std::array<CharacterClass, kAscii> ascii_classes() {
  std::array<CharacterClass, kAscii> classes{};
  for (size_t code = 0; code < kAscii; ++code) {
    classes[code] = looked_up(static_cast<char32_t>(code));
  }
  return classes;
}

const std::array<CharacterClass, kAscii> kAsciiClasses = ascii_classes();

/// The bytes of the character that begins with `first`, by its highest bits;
/// 0 if no character does.
size_t length_by(unsigned char first) {
  if (first < 0x80) {
    return 1;
  }
  if (first < 0xc2 || first > 0xf4) { // continuations, overlong forms
    return 0;
  }
  return first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

} // namespace

CharacterClass class_of(char32_t code) {
  if (code < kAscii) {
    return kAsciiClasses[code];
  }
  return code < kNoCharacter ? looked_up(code) : CharacterClass::Other;
}

Character character_at(std::string_view text, size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  if (first < kAscii) {
    return {.code = first, .kind = kAsciiClasses[first], .bytes = 1};
  }
  const Character not_one{
      .code = kNoCharacter + first, .kind = CharacterClass::Other, .bytes = 1};
  const size_t length = length_by(first);
  if (length == 0 || at + length > text.size()) {
    return not_one;
  }
  char32_t code = first & (0xffU >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(text[at + i]);
    if ((byte & 0xc0U) != 0x80) {
      return not_one;
    }
    code = code << 6 | (byte & 0x3fU);
  }
  const bool is_overlong =
      (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  if (is_overlong || is_surrogate || code >= kNoCharacter) {
    return not_one;
  }
  return {
      .code = code,
      .kind = looked_up(code),
      .bytes = static_cast<uint8_t>(length)};
}

void append_character(std::string& text, char32_t code) {
  const auto add = [&text](char32_t byte) {
    text.push_back(static_cast<char>(static_cast<unsigned char>(byte)));
  };
  if (code >= kNoCharacter) {
    add(code - kNoCharacter);
  } else if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xc0U | code >> 6);
    add(0x80U | (code & 0x3fU));
  } else if (code < 0x10000) {
    add(0xe0U | code >> 12);
    add(0x80U | (code >> 6 & 0x3fU));
    add(0x80U | (code & 0x3fU));
  } else {
    add(0xf0U | code >> 18);
    add(0x80U | (code >> 12 & 0x3fU));
    add(0x80U | (code >> 6 & 0x3fU));
    add(0x80U | (code & 0x3fU));
  }
}

} // namespace gpt
