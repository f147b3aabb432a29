#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gpt {

/// What the patterns of tokenizers ask of a character: its general category in
/// Unicode 16.0, and whether it is white space.
enum class CharacterClass : uint8_t {
  Other,
  Upper, // Lu, Lt
  Lower, // Ll
  Uncased, // Lm, Lo
  Mark, // Mn, Mc, Me
  Number, // Nd, Nl, No
  Space // the property White_Space
};

/// A byte that is no part of UTF-8 counts as a character: kNoCharacter + byte,
/// of the class Other.
constexpr char32_t kNoCharacter = 0x110000;

struct Character {
  char32_t code = 0;
  CharacterClass kind = CharacterClass::Other;
  uint8_t bytes = 1;
};

/// The character that begins at byte `at` of UTF-8 text, at < text.size().
Character character_at(std::string_view text, size_t at);

CharacterClass class_of(char32_t code);

/// Appends the bytes that character_at() would read as `code`.
void append_character(std::string& text, char32_t code);

} // namespace gpt
