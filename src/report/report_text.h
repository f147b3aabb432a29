// Values as people read them.
#pragma once

#include <cstddef>
#include <string>

#include "base/text.h"

namespace tessera::report {

/// At most `max_bytes` of UTF-8 text, cut between characters; "..." marks a
/// cut.
std::string clipped(std::string text, size_t max_bytes);

/// The text without control characters, which a terminal would obey: they
/// become "?".
std::string printable(std::string text);

/// "1.49", "nan".
std::string number_text(double value);
/// "0.41 s", "3 min 05 s", "2 h 10 min".
std::string duration_text(double seconds);

} // namespace tessera::report
