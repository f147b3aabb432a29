#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace tessera::report {

/// Which of `values` to draw if there is room for `limit` of them, as ascending
/// indices. All values if they fit; otherwise the first, the last and, for each
/// of several equally long stretches, the smallest, the greatest and the first
/// that is not finite, so that no spike gets lost. `limit` is at least 8.
std::vector<size_t> decimate(std::span<const double> values, size_t limit);

struct Mean {
  size_t middle = 0; // index of the stretch's middle
  double value = 0;
  size_t count = 0; // of finite values
};

/// The means of `count` equally long stretches over their finite values; nan
/// for a stretch without finite values.
std::vector<Mean> means(std::span<const double> values, size_t count);

} // namespace tessera::report
