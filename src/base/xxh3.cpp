#include "base/xxh3.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera {

uint64_t xxh3_plain(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

Xxh3 best_xxh3() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    return xxh3_avx2;
  }
#endif
  return xxh3_plain;
}

} // namespace tessera
