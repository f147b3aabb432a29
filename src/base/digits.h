#pragma once

#include <string_view>

namespace tessera {

/// "0", "17": one decimal digit at least, and nothing else.
inline bool is_digits(std::string_view text) {
  return !text.empty() &&
      text.find_first_not_of("0123456789") == std::string_view::npos;
}

} // namespace tessera
