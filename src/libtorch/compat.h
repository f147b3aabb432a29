// What differs between the LibTorch versions that Tessera builds with (2.11 to
// 2.13). All code that depends on the version uses this header.
#pragma once

#include <torch/version.h>

#define TESSERA_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||          \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

static_assert(
    TESSERA_TORCH_AT_LEAST(2, 11) && !TESSERA_TORCH_AT_LEAST(2, 14),
    "Tessera is built and tested with LibTorch 2.11 to 2.13");

namespace tessera {

/// 213 for LibTorch 2.13.
inline constexpr int kTorchVersion =
    TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR;

} // namespace tessera
