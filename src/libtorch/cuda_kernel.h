// Kernels of a GPU that NVRTC compiles when they are first needed. Only in a
// build with CUDA's headers.
#pragma once

#include <c10/core/Device.h>

#include <span>
#include <string>
#include <vector>

#include "libtorch/kernel_target.h"

struct CUfunc_st; // of CUDA's driver

namespace tessera::libtorch {

struct KernelSource {
  const char* call; // what needs the kernel; errors name it
  const char* function; // extern "C" in `text`
  std::string text;
};

/// The architectures that NVRTC compiles for: 90 for sm_90.
std::vector<int> nvrtc_architectures();

/// Machine code or PTX. Needs no GPU. Throws c10::Error with NVRTC's log.
std::string compile_kernel(
    const KernelSource& source,
    const KernelTarget& target);

/// A kernel on a device, for good: it is never unloaded.
class CudaKernel {
 public:
  /// Compiles and loads; also while a step is being captured. Throws c10::Error
  /// where that cannot be done.
  CudaKernel(c10::Device device, const KernelSource& source);

  /// On the current stream of the current device, which must be that of the
  /// kernel. `arguments` are addresses of the parameters, in their order.
  void launch(unsigned blocks, unsigned threads, std::span<void*> arguments)
      const;

 private:
  const char* call_;
  CUfunc_st* function_ = nullptr;
};

} // namespace tessera::libtorch
