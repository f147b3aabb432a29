#include "byte_level.h"

#include <array>

#include "unicode/characters.h"

namespace gpt {
namespace {

constexpr size_t kNumBytes = 256;
constexpr size_t kSpellings = 0x144; // U+0143 is the last

struct Spelling {
  std::array<char32_t, kNumBytes> character_of{};
  std::array<int, kSpellings> byte_of{}; // -1: none

  Spelling() {
    byte_of.fill(-1);
    char32_t next = 0x100;
    for (size_t byte = 0; byte < kNumBytes; ++byte) {
      const bool is_visible = (byte >= '!' && byte <= '~') ||
          (byte >= 0xa1 && byte <= 0xff && byte != 0xad);
      const char32_t code = is_visible ? static_cast<char32_t>(byte) : next++;
      character_of[byte] = code;
      byte_of[code] = static_cast<int>(byte);
    }
  }
};

const Spelling& spelling() {
  static const Spelling spelling;
  return spelling;
}

} // namespace

std::string spelled_byte(unsigned char byte) {
  std::string text;
  append_character(text, spelling().character_of[byte]);
  return text;
}

std::optional<std::string> bytes_of_spelled(std::string_view spelled) {
  std::string bytes;
  for (size_t at = 0; at < spelled.size();) {
    const auto character = character_at(spelled, at);
    at += character.bytes;
    const int byte =
        character.code < kSpellings ? spelling().byte_of[character.code] : -1;
    if (byte < 0) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(static_cast<unsigned char>(byte)));
  }
  return bytes;
}

} // namespace gpt
