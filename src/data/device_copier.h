// Copies of batches to a device, ahead of their use.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>

namespace tessera::data {

/// Tensors to visit.
using EachTensor = std::function<void(const std::function<void(at::Tensor&)>&)>;

/// Copies through pinned memory on a stream of its own, for any kind of device
/// that LibTorch knows. Thread safety: start() may be called by several threads
/// at once.
class DeviceCopier {
 public:
  /// Nothing is copied for the CPU. Throws if there is no such device.
  explicit DeviceCopier(at::Device device);

  /// Replaces the tensors by copies that are under way.
  std::optional<c10::Event> start(const EachTensor& each) const;
  /// Makes the current stream of the caller wait for the copies.
  void finish(const std::optional<c10::Event>& copied, const EachTensor& each)
      const;

 private:
  at::Device device_;
  std::optional<c10::Stream> stream_;
};

} // namespace tessera::data
