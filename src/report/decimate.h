#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace tessera::report {

/// Which of `values` to draw when there is room for `limit` of them: indices,
/// ascending. All if they fit; else the first and the last, and of each of
/// equally long stretches the smallest, the greatest and the first that is not
/// finite, so that no spike gets lost. `limit` is at least 8.
std::vector<size_t> decimate(std::span<const double> values, size_t limit);

struct Mean {
  size_t middle = 0; // index of the stretch's middle
  double value = 0;
};

/// The means of `count` equally long stretches, over what is finite; a stretch
/// with nothing finite has none.
std::vector<Mean> means(std::span<const double> values, size_t count);

} // namespace tessera::report
