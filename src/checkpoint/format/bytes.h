#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace tessera::format {

using ByteSpan = std::span<const uint8_t>;

static_assert(
    std::endian::native == std::endian::little,
    "the formats are little-endian and read in place");

/// The number at `place`, which the caller knows to be inside.
template <class T>
T load_le(ByteSpan bytes, uint64_t place) {
  T value;
  std::memcpy(&value, bytes.data() + place, sizeof(T));
  return value;
}

inline std::string_view as_text(ByteSpan bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline ByteSpan as_bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

/// Whether `length` bytes from `begin` lie within `total`; does not overflow.
inline bool fits(uint64_t begin, uint64_t length, uint64_t total) {
  return begin <= total && length <= total - begin;
}

} // namespace tessera::format
