#include "checkpoint/format/extent.h"

#include <algorithm>

namespace tessera::format {

std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes) {
  return checked_bytes(sizes, 1);
}

std::optional<int64_t> checked_bytes(
    const std::vector<int64_t>& sizes,
    int64_t element_bytes) {
  if (std::any_of(sizes.begin(), sizes.end(), [](auto s) { return s < 0; })) {
    return std::nullopt;
  }
  // Checked before multiplying: {2^40, 2^40, 0} has no elements and does not
  // overflow.
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return 0;
  }
  int64_t product = element_bytes;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) {
      return std::nullopt;
    }
  }
  return product;
}

} // namespace tessera::format
