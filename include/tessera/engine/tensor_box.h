#pragma once

#include <tessera/api.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// A block inside a tensor: where it begins and how far it reaches on each dim.
struct TESSERA_API TensorBox {
  std::vector<int64_t> offsets; // one per dim
  std::vector<int64_t> sizes; // one per dim

  /// The number of elements in the box.
  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : sizes) {
      product *= size;
    }
    return product;
  }
  bool operator==(const TensorBox&) const = default;
};

} // namespace tessera
