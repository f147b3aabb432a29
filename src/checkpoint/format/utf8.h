#pragma once

#include <string_view>

namespace tessera::format {

/// Well-formed UTF-8: shortest forms, no surrogates, nothing cut off.
bool is_utf8(std::string_view text);

} // namespace tessera::format
