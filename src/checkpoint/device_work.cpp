#include "checkpoint/device_work.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace tessera::checkpoint {
namespace {

/// Asks the allocator. Tensor::is_pinned() asks the driver, which is forbidden
/// in a process that was forked after its parent used the driver.
bool is_pinned(const at::Tensor& tensor) {
  static const c10::Allocator* const pinned = at::hasCUDA()
      ? at::detail::getCUDAHooks().getPinnedMemoryAllocator()
      : nullptr;
  return pinned != nullptr && tensor.is_cpu() &&
      tensor.storage().allocator() == pinned;
}

} // namespace

void wait_for_devices(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cpu() && !is_pinned(tensor)) {
      continue;
    }
    const at::Device device = tensor.is_cpu()
        ? c10::impl::VirtualGuardImpl(at::kCUDA).getDevice()
        : tensor.device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
      c10::impl::VirtualGuardImpl(device.type())
          .getStream(device)
          .synchronize();
    }
  }
}

} // namespace tessera::checkpoint
