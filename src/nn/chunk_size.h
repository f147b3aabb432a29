// How many tokens have their logits in memory at a time. Without LibTorch:
// `tessera plan` counts with it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::nn {

constexpr int64_t kLeastChunkOnCpu = 128;
/// Each chunk reads and writes the whole float32 gradient of the weight. On a
/// GPU that takes as long as the products of some 250 tokens, so chunks are
/// large there, but no more than half of the tokens if there are many.
constexpr int64_t kLeastChunkOnDevice = 1024;
constexpr int64_t kMostOfLeastChunkOnDevice = 4096;

/// So few tokens that their logits have no more elements than all hidden
/// states, but not so few that overhead counts.
inline int64_t usual_chunk(
    int64_t tokens,
    int64_t width,
    int64_t classes,
    bool on_cpu) {
  const int64_t least = on_cpu
      ? kLeastChunkOnCpu
      : std::clamp(tokens / 2, kLeastChunkOnDevice, kMostOfLeastChunkOnDevice);
  return std::max(least, tokens * width / std::max<int64_t>(classes, 1));
}

} // namespace tessera::nn
