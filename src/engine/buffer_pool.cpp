#include "engine/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/accumulate.h>

#include <utility>

namespace tessera::engine {

c10::DataPtr BufferPool::take(
    size_t bytes,
    c10::Device device,
    c10::Allocator& allocator) {
  if (device.is_cpu()) {
    if (auto data = idle_.take(bytes)) {
      return std::move(*data);
    }
    // A storage remembers the allocator it was created with; if another one has
    // been set since then, that one should see this memory.
    return c10::GetCPUAllocator()->allocate(bytes);
  }
  return allocator.allocate(bytes);
}

void BufferPool::give(c10::DataPtr data, size_t bytes) {
  if (data.device().is_cpu()) {
    idle_.give(bytes, std::move(data));
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

void BufferPool::give(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu()) {
    return;
  }
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = storage->nbytes();
  give(storage->set_data_ptr(c10::DataPtr(nullptr, tensor.device())), bytes);
  storage->set_nbytes(0);
}

} // namespace tessera::engine
