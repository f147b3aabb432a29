// FNV-1a, for digests of a few words that are made on a hot path, one part
// after the other and without a state: what a collective is called with, the
// order of gathers. Bytes in bulk (files, weights) take XXH3, see base/xxh3.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

/// FNV's own start. Any start will do where digests are only compared.
inline constexpr uint64_t kFnvStart = 0xcbf29ce484222325;

/// `value` may be a byte, as in FNV, or a whole word.
inline uint64_t mix_digest(uint64_t digest, uint64_t value) {
  return (digest ^ value) * 0x100000001b3;
}

/// The text and a mark for its end, so that "ab", "c" is not "a", "bc".
inline uint64_t mix_digest(uint64_t digest, std::string_view text) {
  for (const char c : text) {
    digest = mix_digest(digest, uint64_t{static_cast<uint8_t>(c)});
  }
  return mix_digest(digest, uint64_t{0xff});
}

} // namespace tessera
