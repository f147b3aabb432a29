#include "engine/shard_gradient.h"

#include <c10/core/TensorImpl.h>

#include <utility>

#include "engine/first_touch.h"
#include "engine/owners.h"
#include "libtorch/alias.h"

namespace tessera::engine {
namespace {

class ShardGradient : public c10::TensorImpl {
 public:
  using TensorImpl::TensorImpl;

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version,
      bool allow_change) const override {
    return with_key(TensorImpl::shallow_copy_and_detach(version, allow_change));
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version,
      bool allow_change) const override {
    return with_key(
        TensorImpl::shallow_copy_and_detach(std::move(version), allow_change));
  }

 private:
  static c10::intrusive_ptr<TensorImpl> with_key(
      c10::intrusive_ptr<TensorImpl> copy) {
    const at::Tensor base(copy);
    const at::Tensor keyed = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(base.storage()),
        base.key_set().add(kShardKey),
        base.dtype());
    keyed.unsafeGetTensorImpl()->set_sizes_and_strides(
        base.sizes(), base.strides(), base.storage_offset());
    copy->shallow_copy_from(keyed.getIntrusivePtr());
    return copy;
  }
};

} // namespace

at::Tensor gradient_alias_of(
    const at::Tensor& base,
    at::IntArrayRef sizes,
    int64_t offset) {
  at::Tensor alias = at::detail::make_tensor<ShardGradient>(
      c10::Storage(base.storage()), base.key_set(), base.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  alias.unsafeGetTensorImpl()->set_storage_offset(offset);
  return alias;
}

bool is_data_of_gradient(const at::Tensor& tensor) {
  return tensor.defined() &&
      tensor.unsafeGetTensorImpl()->key_set().has(kShardKey) &&
      find_owner(storage_of(tensor)).unit == nullptr;
}

} // namespace tessera::engine
