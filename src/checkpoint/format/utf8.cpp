#include "checkpoint/format/utf8.h"

#include <cstddef>
#include <cstdint>

namespace tessera::format {
namespace {

// The length that a first byte announces, 0 if it cannot be one.
size_t sequence_length(uint8_t first) {
  if (first < 0x80) {
    return 1;
  }
  if (first < 0xc2) { // continuation, or a longer form of ASCII
    return 0;
  }
  return first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
}

bool is_allowed(uint32_t code, size_t length) {
  switch (length) {
    case 3:
      return code >= 0x800 && (code < 0xd800 || code > 0xdfff);
    case 4:
      return code >= 0x10000 && code <= 0x10ffff;
    default:
      return true;
  }
}

} // namespace

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<uint8_t>(text[i]);
    const size_t length = sequence_length(first);
    if (length == 0 || length > text.size() - i) {
      return false;
    }
    uint32_t code = length == 1 ? first : first & (0x7fu >> length);
    for (size_t j = 1; j < length; ++j) {
      const auto byte = static_cast<uint8_t>(text[i + j]);
      if ((byte & 0xc0) != 0x80) {
        return false;
      }
      code = code << 6 | (byte & 0x3f);
    }
    if (!is_allowed(code, length)) {
      return false;
    }
    i += length;
  }
  return true;
}

} // namespace tessera::format
