#include "state/nearest.h"

#include <algorithm>
#include <numeric>

namespace tessera::state {
namespace {

/// Insertions, deletions and replacements from `a` to `b`.
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

} // namespace

std::string nearest(
    std::string_view name,
    const std::vector<std::string>& names) {
  constexpr size_t kLongest = 256; // edits() is quadratic
  std::string best;
  size_t fewest = name.size() / 2 + 1;
  for (const std::string& other : names) {
    if (std::max(name.size(), other.size()) > kLongest) {
      continue;
    }
    const size_t needed = edits(name, other);
    if (needed < fewest) {
      fewest = needed;
      best = other;
    }
  }
  return best;
}

std::string did_you_mean(
    std::string_view name,
    const std::vector<std::string>& names) {
  const std::string meant = nearest(name, names);
  return meant.empty() ? "" : " Did you mean \"" + meant + "\"?";
}

} // namespace tessera::state
