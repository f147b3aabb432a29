#include "shard/fresh_memory.h"

#include <ATen/ops/empty.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace tessera::shard {

at::Tensor empty_to_fill(
    at::IntArrayRef sizes,
    const at::TensorOptions& options) {
  constexpr size_t kLargePage = 2 << 20;
  const at::Tensor tensor = at::empty(sizes, options);
  if (tensor.is_cpu() && tensor.nbytes() >= kLargePage) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
    const uintptr_t first = (begin + page - 1) / page * page;
    const uintptr_t last = (begin + tensor.nbytes()) / page * page;
    // A wish: where it is not granted, nothing changes.
    (void)madvise(
        reinterpret_cast<void*>(first), // NOLINT: whole pages inside
        last - first,
        MADV_HUGEPAGE);
  }
  return tensor;
}

} // namespace tessera::shard
