// Texts in one text, each as "<length>:<bytes>", so that no two lists of texts
// give the same text.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

inline std::string encode_fields(const std::vector<std::string>& fields) {
  std::string text;
  for (const std::string& field : fields) {
    text += std::to_string(field.size()) + ":" + field;
  }
  return text;
}

/// Nothing if `text` is not what encode_fields() writes.
inline std::optional<std::vector<std::string>> decode_fields(
    std::string_view text) {
  std::vector<std::string> fields;
  while (!text.empty()) {
    size_t length = 0;
    const char* const end = text.data() + text.size();
    const auto [colon, error] = std::from_chars(text.data(), end, length);
    if (error != std::errc() || colon == end || *colon != ':' ||
        length > static_cast<size_t>(end - colon - 1)) {
      return std::nullopt;
    }
    fields.emplace_back(colon + 1, length);
    text = std::string_view(colon + 1 + length, end);
  }
  return fields;
}

} // namespace tessera
