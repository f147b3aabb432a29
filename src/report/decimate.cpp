#include "report/decimate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

namespace tessera::report {
namespace {

constexpr size_t kEnds = 2;
constexpr size_t kPerStretch = 3;

void add_stretch(
    std::span<const double> values,
    size_t begin,
    size_t end,
    std::vector<size_t>* chosen) {
  std::optional<size_t> least;
  std::optional<size_t> greatest;
  std::optional<size_t> odd;
  for (size_t i = begin; i < end; ++i) {
    if (!std::isfinite(values[i])) {
      odd = odd.value_or(i);
      continue;
    }
    if (!least || values[i] < values[*least]) {
      least = i;
    }
    if (!greatest || values[i] > values[*greatest]) {
      greatest = i;
    }
  }
  for (const auto& place : {least, greatest, odd}) {
    if (place) {
      chosen->push_back(*place);
    }
  }
}

} // namespace

std::vector<size_t> decimate(std::span<const double> values, size_t limit) {
  const size_t count = values.size();
  std::vector<size_t> chosen;
  if (count <= limit) {
    chosen.resize(count);
    std::iota(chosen.begin(), chosen.end(), size_t{0});
    return chosen;
  }
  const size_t stretches = (limit - kEnds) / kPerStretch;
  chosen.push_back(0);
  for (size_t i = 0; i < stretches; ++i) {
    add_stretch(
        values, count * i / stretches, count * (i + 1) / stretches, &chosen);
  }
  chosen.push_back(count - 1);
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

std::vector<Mean> means(std::span<const double> values, size_t count) {
  std::vector<Mean> result;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = values.size() * i / count;
    const size_t end = values.size() * (i + 1) / count;
    double mean = 0;
    size_t seen = 0;
    for (const double value : values.subspan(begin, end - begin)) {
      if (std::isfinite(value)) {
        // Updates the mean value by value, so that no sum overflows.
        mean += value / (seen + 1.0) - mean / (seen + 1.0);
        ++seen;
      }
    }
    result.push_back(
        {.middle = begin + (end - begin) / 2,
         .value = seen > 0 ? mean : std::numeric_limits<double>::quiet_NaN(),
         .count = seen});
  }
  return result;
}

} // namespace tessera::report
