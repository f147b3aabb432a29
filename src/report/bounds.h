// Bounds of the numbers in a log.
#pragma once

#include <optional>
#include <string_view>

namespace tessera::report {

/// The largest whole number that the page's JavaScript represents exactly.
inline constexpr double kMaxCount = 9007199254740991.0;
/// The end of the year 9999 in seconds since 1970.
inline constexpr double kMaxTime = 253402300799.0;
/// A step takes no longer than this (some 11 days).
inline constexpr double kMaxStepSeconds = 1e6;

/// The value of "nan", "inf" or "-inf", as JSON has to spell them.
std::optional<double> named_number(std::string_view text);

} // namespace tessera::report
