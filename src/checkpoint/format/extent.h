#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::format {

/// The product of `sizes`; nothing if a size is negative or the product
/// overflows.
std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes);

/// checked_numel() times `element_bytes`.
std::optional<int64_t> checked_bytes(
    const std::vector<int64_t>& sizes,
    int64_t element_bytes);

} // namespace tessera::format
