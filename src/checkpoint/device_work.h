// Work that this thread has queued on devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::checkpoint {

/// Waits for the work that this thread has queued on the devices of `tensors`.
/// Tensors are read and written on other threads, whose current streams are not
/// this thread's; pinned memory may still be in use by a device.
void wait_for_devices(const std::vector<at::Tensor>& tensors);

} // namespace tessera::checkpoint
