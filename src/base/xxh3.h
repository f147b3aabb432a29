// XXH3 for this processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

using Xxh3 = uint64_t (*)(const void* data, size_t bytes);

/// The fastest version that the processor can run.
Xxh3 best_xxh3();

// One source, compiled for each set of instructions.
uint64_t xxh3_plain(const void* data, size_t bytes);
uint64_t xxh3_avx2(const void* data, size_t bytes);

} // namespace tessera
