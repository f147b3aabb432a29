// Chooses the names of a checkpoint that a tool looks at.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// True if `name` begins with `prefix` and then ends or continues with a dot.
inline bool begins_with(const std::string& name, const std::string& prefix) {
  return name.starts_with(prefix) &&
      (name.size() == prefix.size() || name[prefix.size()] == '.');
}

inline bool begins_with_any(
    const std::string& name,
    const std::vector<std::string>& prefixes) {
  return std::any_of(
      prefixes.begin(), prefixes.end(), [&](const std::string& prefix) {
        return begins_with(name, prefix);
      });
}

} // namespace tessera::checkpoint
