// What NVRTC compiles for.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace tessera::libtorch {

/// A GPU's architecture, 90 for sm_90, and whether NVRTC makes its machine code
/// or PTX, which the driver translates.
struct KernelTarget {
  int architecture = 0;
  bool is_ptx = false;

  /// As NVRTC names it.
  std::string text() const {
    return (is_ptx ? "compute_" : "sm_") + std::to_string(architecture);
  }
};

/// For a GPU of `architecture`, where NVRTC knows `supported`: the GPU itself,
/// else PTX for the newest older one, which newer GPUs run. For a GPU that is
/// older than all of them the GPU itself, which NVRTC then refuses.
inline KernelTarget kernel_target(
    int architecture,
    const std::vector<int>& supported) {
  int newest_older = 0;
  for (const int known : supported) {
    if (known == architecture) {
      return {.architecture = architecture};
    }
    if (known < architecture) {
      newest_older = std::max(newest_older, known);
    }
  }
  return newest_older == 0
      ? KernelTarget{.architecture = architecture}
      : KernelTarget{.architecture = newest_older, .is_ptx = true};
}

} // namespace tessera::libtorch
