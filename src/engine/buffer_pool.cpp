#include "engine/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/accumulate.h>

#include <utility>

namespace tessera::engine {
namespace {

/// How many buffers of one size are kept: for the unit in use, for the one
/// gathered ahead, and a spare one.
constexpr size_t kMaxIdle = 3;

} // namespace

c10::DataPtr BufferPool::take(
    size_t bytes,
    c10::Device device,
    c10::Allocator& allocator) {
  if (device.is_cpu()) {
    auto found = idle_.find(bytes);
    if (found != idle_.end() && !found->second.empty()) {
      c10::DataPtr data = std::move(found->second.back());
      found->second.pop_back();
      return data;
    }
    // A storage remembers the allocator it was created with; if another one has
    // been set since then, that one should see this memory.
    return c10::GetCPUAllocator()->allocate(bytes);
  }
  return allocator.allocate(bytes);
}

void BufferPool::give(c10::DataPtr data, size_t bytes) {
  if (!data.device().is_cpu()) {
    return;
  }
  auto& idle = idle_[bytes];
  if (idle.size() < kMaxIdle) {
    idle.push_back(std::move(data));
  }
}

at::Tensor BufferPool::take(
    at::IntArrayRef sizes,
    const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    return at::empty(sizes, options);
  }
  at::Tensor tensor = at::empty({0}, options);
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
      options.dtype().itemsize();
  storage->set_data_ptr_noswap(
      take(bytes, options.device(), *storage->allocator()));
  storage->set_nbytes(bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

void BufferPool::give(at::Tensor tensor) {
  if (!tensor.device().is_cpu()) {
    return;
  }
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = storage->nbytes();
  give(storage->set_data_ptr(c10::DataPtr(nullptr, tensor.device())), bytes);
  storage->set_nbytes(0);
}

void BufferPool::trim(size_t count) {
  for (auto& [bytes, idle] : idle_) {
    while (idle.size() > count) {
      idle.pop_back();
    }
  }
}

} // namespace tessera::engine
