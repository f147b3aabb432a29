#include "nn/cross_entropy_kernel.h"

#include <c10/util/Exception.h>

#include <exception>
#include <map>
#include <utility>

#include "base/mutex.h"

namespace tessera::nn {
namespace {

FindKernel& kernels_of_tests() {
  static auto& find = *new FindKernel;
  return find;
}

/// One reason is that of all devices and dtypes.
void warn_once(const char* reason) {
  static std::once_flag once;
  std::call_once(once, [&] {
    TORCH_WARN(
        "linear_cross_entropy uses LibTorch's operators, which is slower: its kernel cannot be used here. ",
        reason);
  });
}

/// Each is compiled once, also if that fails; null then.
struct CudaKernels {
  using Key = std::pair<at::DeviceIndex, at::ScalarType>;
  Mutex mutex;
  std::map<Key, std::unique_ptr<CrossEntropyKernel>> by_key
      TESSERA_GUARDED_BY(mutex);
};
CudaKernels& cuda_kernels() {
  static auto& instance = *new CudaKernels;
  return instance;
}

const CrossEntropyKernel* cuda_kernel(at::Device device, at::ScalarType dtype) {
  CudaKernels& all = cuda_kernels();
  const MutexLock lock(all.mutex);
  const CudaKernels::Key key{device.index(), dtype};
  const auto known = all.by_key.find(key);
  if (known != all.by_key.end()) {
    return known->second.get();
  }
  auto& kernel = all.by_key[key];
  try {
    kernel = make_cuda_cross_entropy_kernel(device, dtype);
  } catch (const std::exception& error) {
    warn_once(error.what());
  }
  return kernel.get();
}

} // namespace

const CrossEntropyKernel* cross_entropy_kernel(
    at::Device device,
    at::ScalarType dtype) {
  if (kernels_of_tests()) {
    return kernels_of_tests()(device, dtype);
  }
  const bool is_known = dtype == at::kFloat || dtype == at::kBFloat16;
  return device.is_cuda() && is_known ? cuda_kernel(device, dtype) : nullptr;
}

void set_cross_entropy_kernel_for_tests(FindKernel find) {
  kernels_of_tests() = std::move(find);
}

} // namespace tessera::nn
