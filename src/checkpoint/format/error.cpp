#include "checkpoint/format/error.h"

#include <string>

namespace tessera::format {

FormatError::FormatError(uint64_t offset, const std::string& text)
    : std::runtime_error("byte " + std::to_string(offset) + ": " + text),
      offset_(offset) {}

FormatError::FormatError(const std::string& text) : std::runtime_error(text) {}

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 120;
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += c;
    }
  }
  return out + (text.size() > kLongest ? "...\"" : "\"");
}

} // namespace tessera::format
