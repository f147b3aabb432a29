#include "libtorch/alias.h"

namespace tessera::libtorch {

at::Tensor alias_of(
    const at::Tensor& base,
    at::IntArrayRef sizes,
    int64_t offset,
    c10::DispatchKeySet more_keys) {
  const auto keys = base.unsafeGetTensorImpl()->key_set() | more_keys;
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(base.storage()), keys, base.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  alias.unsafeGetTensorImpl()->set_storage_offset(offset);
  return alias;
}

void show(const at::Tensor& tensor, const at::Tensor& other) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

} // namespace tessera::libtorch
