// Errors that list what is wrong, a line for each.
#pragma once

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// The first `most` lines, indented, and how many more there are.
inline std::string first_lines(
    const std::vector<std::string>& lines,
    size_t most) {
  std::string text;
  for (size_t i = 0; i < std::min(lines.size(), most); ++i) {
    text += "\n  " + lines[i];
  }
  if (lines.size() > most) {
    text += fmt::format("\n  and {} more", lines.size() - most);
  }
  return text;
}

} // namespace tessera::checkpoint
