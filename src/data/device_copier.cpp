#include "data/device_copier.h"

#include <tessera/error.h>

#include <ATen/Context.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>

namespace tessera::data {

DeviceCopier::DeviceCopier(at::Device device) : device_(device) {
  if (device.is_cpu()) {
    return;
  }
  const auto refuse = [&](const std::string& what) {
    raise<c10::ValueError>(
        {.call = "Loader"},
        "the device " + device.str() + " was asked for, but " + what +
            " Give a device that exists, or none.");
  };
  if (!c10::impl::hasDeviceGuardImpl(device.type())) {
    refuse("this LibTorch was built without such devices.");
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::DeviceIndex count = guard.deviceCount();
  if (count == 0 || device.index() >= count) {
    refuse("LibTorch finds " + std::to_string(count) + " of them.");
  }
  at::globalContext().lazyInitDevice(device.type());
  if (!device.has_index()) {
    device_ = guard.getDevice();
  }
  stream_ = guard.getStreamFromGlobalPool(device_);
}

std::optional<c10::Event> DeviceCopier::start(const EachTensor& each) const {
  if (!stream_) {
    return std::nullopt;
  }
  const c10::StreamGuard on_stream(*stream_);
  each([this](at::Tensor& tensor) {
    if (tensor.defined() && tensor.device() != device_) {
      // The allocator keeps pinned memory until the copy has read it.
      const at::Tensor host = tensor.is_cpu() ? tensor.pin_memory() : tensor;
      tensor = host.to(device_, /*non_blocking=*/true);
    }
  });
  c10::Event copied(device_.type());
  copied.record(*stream_);
  return copied;
}

void DeviceCopier::finish(
    const std::optional<c10::Event>& copied,
    const EachTensor& each) const {
  if (!copied) {
    return;
  }
  const c10::Stream current =
      c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  copied->block(current);
  each([&](at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_cpu()) {
      tensor.record_stream(current); // else the allocator reuses it too early
    }
  });
}

} // namespace tessera::data
