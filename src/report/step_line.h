// Lines of kind "step", which are nearly all of a log, read fast. Whatever is
// unusual about a line, be it right or wrong, is left to parse_line.
#pragma once

#include <optional>
#include <string_view>

#include "report/log_line.h"

namespace tessera::report {

/// Nothing if the line is of another kind or not plain: an object whose values
/// are numbers in their bounds, short texts, or null, and "memory", an object
/// of such. What it gives is what parse_line would have found.
std::optional<LogLine> parse_plain_step(std::string_view text);

} // namespace tessera::report
