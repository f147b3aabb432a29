#include "checkpoint/format/format_error.h"

#include <algorithm>
#include <string>

#include "base/terminal_escapes.h"

namespace tessera::format {

FormatError::FormatError(uint64_t offset, const std::string& text)
    : std::runtime_error("byte " + std::to_string(offset) + ": " + text),
      offset_(offset) {}

FormatError::FormatError(const std::string& text) : std::runtime_error(text) {}

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 120;
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  size_t escaped = 0; // bytes left of the current control character
  for (size_t i = 0; i < std::min(text.size(), kLongest); ++i) {
    escaped = escaped > 0 ? escaped - 1 : 0;
    if (escaped == 0) {
      escaped = control_length(text, i);
    }
    const auto byte = static_cast<unsigned char>(text[i]);
    if (escaped > 0) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += text[i];
    }
  }
  return out + (text.size() > kLongest ? "...\"" : "\"");
}

} // namespace tessera::format
