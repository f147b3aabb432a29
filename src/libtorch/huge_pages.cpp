#include "libtorch/huge_pages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace tessera::libtorch {
namespace {

constexpr size_t kAlign = 64; // as LibTorch's own allocations
constexpr size_t kLargePage = 2 << 20;

/// Asks the kernel for large pages. If the kernel refuses, nothing changes.
void ask_for_large_pages(const at::Tensor& block) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(block.mutable_data_ptr());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + block.nbytes()) / page * page;
  if (first < last) {
    (void)madvise(
        reinterpret_cast<void*>(first), // NOLINT: whole pages inside
        last - first,
        MADV_HUGEPAGE);
  }
}

} // namespace

std::vector<at::Tensor> empty_to_fill(
    const std::vector<std::vector<int64_t>>& sizes,
    const std::vector<at::TensorOptions>& options) {
  std::vector<size_t> offsets;
  size_t bytes = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    offsets.push_back(bytes);
    const auto numel = static_cast<size_t>(c10::multiply_integers(sizes[i]));
    bytes +=
        (numel * options[i].dtype().itemsize() + kAlign - 1) / kAlign * kAlign;
  }
  std::vector<at::Tensor> result;
  const bool in_one_block = bytes >= kLargePage && sizes.size() > 1 &&
      options.front().device().is_cpu();
  if (!in_one_block) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      result.push_back(at::empty(sizes[i], options[i]));
      if (result.back().is_cpu() && result.back().nbytes() >= kLargePage) {
        ask_for_large_pages(result.back());
      }
    }
    return result;
  }
  const at::Tensor block =
      at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte));
  ask_for_large_pages(block);
  auto* data = static_cast<uint8_t*>(block.mutable_data_ptr());
  for (size_t i = 0; i < sizes.size(); ++i) {
    result.push_back(at::from_blob(
        data + offsets[i], sizes[i], [block](void*) {}, options[i]));
  }
  return result;
}

} // namespace tessera::libtorch
