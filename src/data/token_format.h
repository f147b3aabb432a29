// The header of a token file: docs/formats/token-file.md.
#pragma once

#include <bit>
#include <cstdint>

namespace tessera::data {

static_assert(std::endian::native == std::endian::little);

/// The last character is the version.
inline constexpr char kTokenMagic[8] = {'T', 'E', 'S', 'S', 'T', 'O', 'K', '1'};

struct TokenHeader {
  char magic[8];
  uint32_t token_bytes; // 2 or 4
  uint32_t vocabulary; // tokens are below it
  uint64_t size; // tokens
};
static_assert(sizeof(TokenHeader) == 24);

/// The largest vocabulary: tokens are int32 in most programs.
inline constexpr int64_t kMaxVocabulary = int64_t{1} << 31;

} // namespace tessera::data
