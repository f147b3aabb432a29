// Values for the page's script, as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

namespace tessera::report {

/// Eight digits: more than a float has, half of what a double prints. "nan",
/// "inf" and "-inf" for what JSON has no numbers for.
inline nlohmann::json compact(double value) {
  if (std::isnan(value)) {
    return "nan";
  }
  if (std::isinf(value)) {
    return value > 0 ? "inf" : "-inf";
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%.8g", value);
  return std::strtod(text, nullptr);
}

template <class T>
nlohmann::json or_null(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}

/// Text of the log may be no UTF-8: what is wrong becomes U+FFFD.
inline std::string json_text(const nlohmann::json& data) {
  return data.dump(
      -1,
      ' ',
      /*ensure_ascii=*/false,
      nlohmann::json::error_handler_t::replace);
}

} // namespace tessera::report
