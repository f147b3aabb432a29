// What a terminal would obey in a text from elsewhere.
#pragma once

#include <cstddef>
#include <string_view>

namespace tessera {

/// The length in bytes of the control character of ASCII or Unicode at `begin`,
/// or of the character that changes the direction of writing; 0 if there is
/// none.
inline size_t control_length(std::string_view text, size_t begin) {
  const auto byte = [&](size_t i) {
    return begin + i < text.size() ? static_cast<unsigned char>(text[begin + i])
                                   : 0U;
  };
  if (byte(0) < 0x20 || byte(0) == 0x7F) {
    return 1;
  }
  if (byte(0) == 0xC2 && byte(1) >= 0x80 && byte(1) < 0xA0) {
    return 2; // U+0080 to U+009F
  }
  const bool is_direction = byte(0) == 0xE2 &&
      ((byte(1) == 0x80 && byte(2) >= 0xAA && byte(2) <= 0xAE) || // U+202A on
       (byte(1) == 0x81 && byte(2) >= 0xA6 && byte(2) <= 0xA9)); // U+2066 on
  return is_direction ? 3 : 0;
}

} // namespace tessera
