// Counts and sizes as people read them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdio>
#include <string>

namespace tessera {

/// "12,345".
inline std::string count_text(double count) {
  std::array<char, 64> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%.0f", count);
  std::string digits = buffer.data();
  for (size_t i = digits.size(); i > 3; i -= 3) {
    digits.insert(i - 3, ",");
  }
  return digits;
}

/// "1 step", "2 steps".
inline std::string count_text(double count, const std::string& noun) {
  return count_text(count) + " " + noun + (count == 1 ? "" : "s");
}

/// "17 bytes", "1.2 GB": in powers of 1000.
inline std::string bytes_text(double bytes) {
  if (bytes < 1000) {
    return count_text(bytes, "byte");
  }
  constexpr std::array kUnits{"kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  bytes /= 1000;
  while (bytes >= 999.95 && unit + 1 < kUnits.size()) {
    bytes /= 1000;
    ++unit;
  }
  std::array<char, 64> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%.1f %s", bytes, kUnits[unit]);
  return buffer.data();
}

} // namespace tessera
