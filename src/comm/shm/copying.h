// How collectives place bytes in slots.
#pragma once

#include <cstddef>
#include <cstring>

namespace tessera::comm::shm {

/// Parts of a slot begin at a multiple of this.
inline constexpr size_t kAlign = 64;

/// `to` may be `from`.
inline void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (to != from && bytes != 0) {
    std::memcpy(to, from, bytes);
  }
}

} // namespace tessera::comm::shm
