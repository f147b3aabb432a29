// What a number in a log may be.
#pragma once

#include <optional>
#include <string_view>

namespace tessera::report {

/// Whole numbers that the page's JavaScript can tell apart.
inline constexpr double kMaxCount = 9007199254740991.0;
/// Seconds since 1970 of the year 9999's end.
inline constexpr double kMaxTime = 253402300799.0;
/// A step takes no longer than this (some 11 days).
inline constexpr double kMaxStepSeconds = 1e6;

/// "nan", "inf" and "-inf" as JSON has to spell them.
std::optional<double> named_number(std::string_view text);

} // namespace tessera::report
