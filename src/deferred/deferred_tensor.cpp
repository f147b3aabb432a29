#include "deferred/deferred_tensor.h"

#include <tessera/error.h>

#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace tessera::deferred {
namespace {

void release(void* context) {
  delete static_cast<Deferred*>(context);
}

/// data_ptr() is not an operator, so the storage itself has to refuse it.
/// Releases of LibTorch that cannot lift this refusal for a while refuse in
/// their own words.
template <class Impl>
concept CanRefuse = requires(Impl& impl) {
  impl.clear_data_ptr_access_error_msg_();
};

template <class Impl>
void refuse_pointers(Impl& storage) {
  if constexpr (CanRefuse<Impl>) {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
        format_error({.call = "data_ptr"}, kNoValues));
  }
}

template <class Impl>
void allow_pointers(Impl& storage) {
  if constexpr (CanRefuse<Impl>) {
    storage.clear_data_ptr_access_error_msg_();
  }
}

} // namespace

const Deferred* find_deferred(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage()
      ? find_deferred(tensor.storage())
      : nullptr;
}

const Deferred* find_deferred(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()
      ->_mutable_data_ptr_no_checks()
      .cast_context<Deferred>(&release);
}

TensorRef ref_to(const at::Tensor& deferred) {
  return TensorRef::of(deferred, find_deferred(deferred)->id);
}

void defer(
    const at::Tensor& meta,
    const std::shared_ptr<Tape>& tape,
    at::Device device) {
  c10::StorageImpl& storage = *meta.storage().unsafeGetStorageImpl();
  auto context = std::make_unique<Deferred>(
      Deferred{tape, tape->add_storage(device)}); // clang 14 needs the braces
  storage.set_data_ptr_noswap(c10::DataPtr(
      nullptr, context.release(), &release, c10::Device(c10::kMeta)));
  refuse_pointers(storage);
  add_deferred_key(meta);
}

void add_deferred_key(const at::Tensor& deferred) {
  c10::TensorImpl* impl = deferred.unsafeGetTensorImpl();
  if (impl->key_set().has(kDeferredKey)) {
    return;
  }
  const at::Tensor keyed = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(deferred.storage()),
      impl->key_set().add(kDeferredKey),
      deferred.dtype());
  keyed.unsafeGetTensorImpl()->set_sizes_and_strides(
      deferred.sizes(), deferred.strides(), deferred.storage_offset());
  impl->shallow_copy_from(keyed.getIntrusivePtr());
}

void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    // The accumulator remembers which device gradients must be on.
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

AllowPointers::~AllowPointers() {
  for (const c10::Storage& storage : storages_) {
    refuse_pointers(*storage.unsafeGetStorageImpl());
  }
}

void AllowPointers::add(const c10::Storage& deferred) {
  storages_.push_back(deferred);
  allow_pointers(*deferred.unsafeGetStorageImpl());
}

} // namespace tessera::deferred
