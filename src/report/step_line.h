// Lines of kind "step", which are nearly all of a log, read fast. Lines that
// are unusual, valid or not, are left to parse_line.
#pragma once

#include <optional>
#include <string_view>

#include "report/log_line.h"

namespace tessera::report {

/// Returns nothing if the line is of another kind or not plain: an object whose
/// values are numbers in their bounds, short texts, or null, and "memory", an
/// object of such. The result is the same as that of parse_line.
std::optional<LogLine> parse_plain_step(std::string_view text);

} // namespace tessera::report
