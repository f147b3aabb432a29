#include "engine/bundle.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "engine/owners.h"
#include "libtorch/compat.h"

namespace tessera::engine {
namespace {

size_t bytes_held(const at::Tensor& tensor) {
  return tensor.defined() ? storage_of(tensor)->nbytes() : 0;
}

} // namespace

Bundle::Bundle(
    Layout layout,
    at::Tensor shard,
    at::Device device,
    const Groups& groups,
    const UnitOptions& options,
    BufferPool& pool)
    : layout_(std::move(layout)),
      groups_(groups),
      options_(options),
      pool_(pool),
      device_(device),
      shard_(std::move(shard)),
      used_(layout_.num_params(), false) {
  const auto dtype = shard_.is_floating_point() && options_.param_dtype
      ? *options_.param_dtype
      : shard_.scalar_type();
  full_ = at::empty({0}, at::TensorOptions(device_).dtype(dtype));
  full_.unsafeGetTensorImpl()->set_sizes_contiguous({layout_.full_numel()});
  storage_ = storage_of(full_);
  shows_shard_ = groups_.shard.size() == 1 && dtype == shard_.scalar_type() &&
      !options_.offload;
}

void Bundle::show_bytes(c10::DataPtr data, size_t bytes) {
#if TESSERA_TORCH_AT_LEAST(2, 13)
  storage_->clear_data_ptr_access_error_msg_();
#endif
  storage_->set_data_ptr_noswap(std::move(data));
  storage_->set_nbytes(bytes);
}

void Bundle::give_bytes() {
  const size_t bytes =
      static_cast<size_t>(full_.numel()) * full_.element_size();
  show_bytes(
      shows_shard_ ? c10::DataPtr(storage_of(shard_)->mutable_data(), device_)
                   : pool_.take(bytes, device_, *storage_->allocator()),
      bytes);
}

void Bundle::start_gather(std::string_view label) {
  if (shows_shard_) {
    give_bytes();
    return;
  }
  // Not into the storage that faces view: a raw pointer to it would see a
  // gather that is not finished.
  const int64_t shard_numel = layout_.shard_numel();
  gathered_ = pool_.take({layout_.num_ranks(), shard_numel}, full_.options());
  const at::Tensor& target = gathered_;
  at::Tensor mine = shard_;
  if (shard_.scalar_type() != full_.scalar_type() ||
      shard_.device() != full_.device()) {
    // Copies directly into this rank's part of the result.
    mine = target.view({-1}).narrow(
        0, groups_.shard.rank() * shard_numel, shard_numel);
    mine.copy_(shard_, /*non_blocking=*/true);
    if (shard_.is_pinned() && !device_.is_cpu()) {
      offload_copied_.emplace(device_.type());
      offload_copied_->record(
          c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    }
  }
  gather_ = groups_.shard.all_gather_into_async(target, mine, label);
}

void Bundle::before_write() {
  if (offload_copied_) {
    offload_copied_->synchronize();
    offload_copied_.reset();
  }
}

void Bundle::finish_gather() {
  std::exchange(gather_, Work()).wait();
  if (!gathered_.defined()) {
    return;
  }
  const at::Tensor gathered = std::exchange(gathered_, at::Tensor());
  if (layout_.kind() == Layout::Kind::Dim0) {
    give_bytes();
    unpack(full_, gathered);
    pool_.give(gathered);
    return;
  }
  // The shards, one after another, are the full buffer: the memory is moved,
  // not copied.
  c10::StorageImpl* from = storage_of(gathered);
  const size_t bytes = from->nbytes();
  show_bytes(from->set_data_ptr(c10::DataPtr(nullptr, from->device())), bytes);
  from->set_nbytes(0);
}

void Bundle::free_full(const std::string& reason) {
  const size_t bytes = storage_->nbytes();
  c10::DataPtr data =
      storage_->set_data_ptr(c10::DataPtr(nullptr, storage_->device()));
  storage_->set_nbytes(0);
  if (!shows_shard_) {
    pool_.give(std::move(data), bytes);
  }
#if TESSERA_TORCH_AT_LEAST(2, 13)
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(reason);
#else
  (void)reason;
#endif
}

/// Dim0: from each rank's chunks to whole parameters.
void Bundle::unpack(const at::Tensor& full, const at::Tensor& gathered) const {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  const int64_t ranks = layout_.num_ranks();
  for (size_t index = 0; index < layout_.num_params(); ++index) {
    const int64_t chunk = layout_.chunk_numel(index);
    if (chunk > 0) {
      to.push_back(full.narrow(0, layout_.full_offset(index), chunk * ranks)
                       .view({ranks, chunk}));
      from.push_back(gathered.narrow(1, layout_.chunk_offset(index), chunk));
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
}

at::Tensor Bundle::gather_copy(const at::Tensor& part, std::string_view label)
    const {
  at::Tensor gathered = at::empty(
      {layout_.num_ranks(), layout_.shard_numel()},
      part.options().device(device_).pinned_memory(false));
  if (layout_.num_ranks() == 1) {
    gathered.view({-1}).copy_(part);
    return gathered.view({-1});
  }
  groups_.shard.all_gather_into(gathered, part.to(device_), label);
  if (layout_.kind() == Layout::Kind::Flat) {
    return gathered.view({-1});
  }
  at::Tensor full = at::empty({layout_.full_numel()}, gathered.options());
  unpack(full, gathered);
  return full;
}

/// Where the gradient of a parameter goes, padding left out: one range in Flat,
/// a column of (ranks, chunk) in Dim0.
at::Tensor Bundle::gradient_slot(const at::Tensor& buffer, size_t index) const {
  return layout_.kind() == Layout::Kind::Flat
      ? buffer.view({-1}).narrow(
            0, layout_.full_offset(index), layout_.numel(index))
      : buffer.narrow(
            1, layout_.chunk_offset(index), layout_.chunk_numel(index));
}

at::ScalarType Bundle::reduce_dtype() const {
  return shard_.is_floating_point()
      ? options_.reduce_dtype.value_or(shard_.scalar_type())
      : shard_.scalar_type(); // complex
}

void Bundle::add_gradients(
    const std::vector<at::Tensor>& gradients,
    const std::vector<bool>& trainable) {
  const auto options = full_.options().dtype(reduce_dtype());
  // On one rank this memory becomes the gradient of the leaves and does not
  // return to the pool.
  at::Tensor buffer = layout_.num_ranks() == 1
      ? at::empty({1, layout_.shard_numel()}, options)
      : pool_.take({layout_.num_ranks(), layout_.shard_numel()}, options);
  if (options_.one_leaf) {
    buffer.zero_(); // its padding is part of the leaf's gradient
  } // otherwise the gaps between parameters are never read
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  const auto copy = [&](const at::Tensor& target, const at::Tensor& source) {
    if (source.numel() > 0) {
      to.push_back(target);
      from.push_back(source);
    }
  };
  for (size_t index = 0; index < layout_.num_params(); ++index) {
    const at::Tensor slot = gradient_slot(buffer, index);
    if (!trainable[index] || !gradients[index].defined()) {
      slot.zero_();
      continue;
    }
    used_[index] = true;
    const at::Tensor gradient = gradients[index].is_sparse()
        ? gradients[index].to_dense()
        : gradients[index];
    if (layout_.kind() == Layout::Kind::Flat) {
      copy(slot.view(gradient.sizes()), gradient);
      continue;
    }
    // Whole chunks at once, then the last, shorter one.
    const int64_t numel = layout_.numel(index);
    const int64_t chunk = layout_.chunk_numel(index);
    const int64_t whole = chunk == 0 ? 0 : numel / chunk;
    const at::Tensor flat = gradient.reshape({-1});
    copy(
        slot.narrow(0, 0, whole),
        flat.narrow(0, 0, whole * chunk).view({whole, chunk}));
    if (numel > whole * chunk) {
      copy(
          slot[whole].narrow(0, 0, numel - whole * chunk),
          flat.narrow(0, whole * chunk, numel - whole * chunk));
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
  if (gradients_.defined()) {
    buffer.add_(gradients_);
    if (layout_.num_ranks() > 1) {
      pool_.give(std::exchange(gradients_, at::Tensor()));
    }
  }
  gradients_ = std::move(buffer);
}

void Bundle::start_reduction(bool all_reduce, std::string_view label) {
  all_reduces_ = all_reduce;
  if (!gradients_.defined()) { // only what an earlier reduction left
    reduced_ = std::exchange(partial_, at::Tensor());
    if (layout_.num_ranks() == 1) {
      reduction_ =
          groups_.replicate.all_reduce_async(reduced_, ReduceOp::Avg, label);
    }
    return;
  }
  if (layout_.num_ranks() == 1) {
    reduced_ = std::exchange(gradients_, at::Tensor()).view({-1});
    if (groups_.replicate.valid() && all_reduce) {
      if (partial_.defined()) {
        reduced_.add_(std::exchange(partial_, at::Tensor()));
      }
      reduction_ =
          groups_.replicate.all_reduce_async(reduced_, ReduceOp::Avg, label);
    }
    return;
  }
  reduced_ = at::empty({layout_.shard_numel()}, gradients_.options());
  reduction_ = groups_.shard.reduce_scatter_async(
      reduced_, gradients_, ReduceOp::Avg, label);
}

Bundle::Reduced Bundle::finish_reduction(std::string_view label) {
  std::exchange(reduction_, Work()).wait();
  at::Tensor mean = std::exchange(reduced_, at::Tensor());
  if (gradients_.defined()) { // what was scattered
    pool_.give(std::exchange(gradients_, at::Tensor()));
  }
  if (groups_.replicate.valid()) {
    if (partial_.defined()) {
      mean.add_(std::exchange(partial_, at::Tensor()));
    }
    if (!all_reduces_) {
      partial_ = std::move(mean);
      return {};
    }
    if (layout_.num_ranks() > 1) {
      groups_.replicate.all_reduce(mean, ReduceOp::Avg, label);
    }
  }
  std::vector<bool> used(layout_.num_params(), false);
  used.swap(used_);
  return {mean.to(shard_.options().pinned_memory(false)), std::move(used)};
}

void Bundle::drop_reduction() noexcept {
  settle();
  reduced_.reset();
  gradients_.reset();
  partial_.reset();
  used_.assign(layout_.num_params(), false);
}

void Bundle::settle() noexcept {
  for (Work* work : {&gather_, &reduction_}) {
    try {
      std::exchange(*work, Work()).wait();
    } catch (const std::exception&) {
      // The caller has an error that says more, or nobody is left to report to.
    }
  }
  gathered_.reset();
}

size_t Bundle::full_bytes_now() const {
  return (shows_shard_ ? 0 : storage_->nbytes()) + bytes_held(gathered_);
}

size_t Bundle::gradient_bytes_now() const {
  return bytes_held(gradients_) + bytes_held(reduced_) + bytes_held(partial_);
}

} // namespace tessera::engine
