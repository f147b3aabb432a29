// Compiled with -mavx2, and called only on a processor with AVX2: three times
// as fast as the version for all processors.
#include "base/xxh3.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera {

uint64_t xxh3_avx2(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

} // namespace tessera
