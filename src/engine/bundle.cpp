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

/// The same memory as integers: a sum with zeros keeps every bit of what one
/// rank has, as it does not keep the sign of a floating-point zero.
at::Tensor as_integers(const at::Tensor& whole) {
  return whole.view(at::kInt);
}

/// Puts this rank's part of each parameter, which has the layout of the shard,
/// to its place in `whole`, and zeros elsewhere. `part` may be of another dtype
/// or device.
void place_among_zeros(
    const Layout& layout,
    int rank,
    const at::Tensor& part,
    const at::Tensor& whole) {
  whole.zero_();
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (size_t index = 0; index < layout.num_params(); ++index) {
    const Run run = layout.run(index, rank);
    if (run.numel > 0) {
      to.push_back(whole.narrow(
          0, layout.full_offset(index) + run.param_begin, run.numel));
      from.push_back(part.narrow(0, run.shard_begin, run.numel));
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from, /*non_blocking=*/true);
  }
}

/// From each rank's chunks to whole parameters: whole chunks at once, then the
/// last, shorter one.
void unpack(
    const Layout& layout,
    const at::Tensor& full,
    const at::Tensor& gathered) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  const at::Tensor by_rank = gathered.view({layout.num_ranks(), -1});
  for (size_t index = 0; index < layout.num_params(); ++index) {
    const int64_t chunk = layout.chunk_numel(index);
    if (chunk == 0) {
      continue;
    }
    const int64_t numel = layout.numel(index);
    const int64_t whole = numel / chunk;
    const at::Tensor param = full.narrow(0, layout.full_offset(index), numel);
    const at::Tensor chunks =
        by_rank.narrow(1, layout.chunk_offset(index), chunk);
    if (whole > 0) {
      to.push_back(param.narrow(0, 0, whole * chunk).view({whole, chunk}));
      from.push_back(chunks.narrow(0, 0, whole));
    }
    if (const int64_t rest = numel - whole * chunk; rest > 0) {
      to.push_back(param.narrow(0, whole * chunk, rest));
      from.push_back(chunks[whole].narrow(0, 0, rest));
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
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
      full_(at::empty(
          {0},
          at::TensorOptions(device_).dtype(
              shard_.is_floating_point() && options_.param_dtype
                  ? *options_.param_dtype
                  : shard_.scalar_type()))),
      storage_(storage_of(full_)),
      shows_shard_(
          groups_.shard.size() == 1 && !options_.offload &&
          (full_.scalar_type() == shard_.scalar_type() ||
           options_.keep_cast_shards)),
      cast_(
          shard_,
          full_.options(),
          options_.keep_cast_shards &&
              full_.scalar_type() != shard_.scalar_type()),
      gradients_(layout_, shard_, full_.options(), groups_, options_, pool_) {
  full_.unsafeGetTensorImpl()->set_sizes_contiguous({layout_.full_numel()});
}

void Bundle::show_bytes(c10::DataPtr data, size_t bytes) {
#if TESSERA_TORCH_AT_LEAST(2, 13)
  storage_->clear_data_ptr_access_error_msg_();
#endif
  storage_->set_data_ptr_noswap(std::move(data));
  storage_->set_nbytes(bytes);
}

/// Its own, or those of `source` where it borrows.
void Bundle::give_bytes(const at::Tensor& source) {
  const size_t bytes =
      static_cast<size_t>(full_.numel()) * full_.element_size();
  show_bytes(
      shows_shard_ ? c10::DataPtr(storage_of(source)->mutable_data(), device_)
                   : pool_.take(bytes, device_, *storage_->allocator()),
      bytes);
}

void Bundle::start_gather(std::string_view label, int64_t num_writes) {
  const at::Tensor& source =
      cast_.is_kept() ? cast_.values(num_writes) : shard_;
  if (shows_shard_) {
    give_bytes(source);
    return;
  }
  // Not into the storage that faces view: a raw pointer to it would see a
  // gather that is not finished.
  gather_.into = pool_.take({layout_.travel_numel()}, full_.options());
  if (layout_.travel() == Layout::Travel::Whole) {
    place_among_zeros(layout_, groups_.shard.rank(), source, gather_.into);
    note_offload_copy();
    gather_.work = groups_.shard.all_reduce_async(
        as_integers(gather_.into), ReduceOp::Sum, label);
    return;
  }
  at::Tensor mine = source;
  if (source.scalar_type() != full_.scalar_type() ||
      source.device() != full_.device()) {
    // Copies directly into this rank's part of the result.
    const int64_t shard_numel = layout_.shard_numel();
    mine =
        gather_.into.narrow(0, groups_.shard.rank() * shard_numel, shard_numel);
    mine.copy_(source, /*non_blocking=*/true);
    note_offload_copy();
  }
  gather_.work = groups_.shard.all_gather_into_async(gather_.into, mine, label);
}

/// The shard was copied to the device, perhaps not yet to its end.
void Bundle::note_offload_copy() {
  if (shard_.is_pinned() && !device_.is_cpu()) {
    offload_copied_.emplace(device_.type());
    offload_copied_->record(
        c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
}

void Bundle::before_write() {
  if (offload_copied_) {
    offload_copied_->synchronize();
    offload_copied_.reset();
  }
}

void Bundle::finish_gather() {
  std::exchange(gather_.work, Work()).wait();
  if (!gather_.into.defined()) {
    return;
  }
  const at::Tensor gathered = std::exchange(gather_.into, at::Tensor());
  if (layout_.travel() == Layout::Travel::Chunks) {
    give_bytes(shard_);
    unpack(layout_, full_, gathered);
    pool_.give(gathered);
    return;
  }
  // What travelled is the full buffer: the memory is moved, not copied.
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

at::Tensor Bundle::gather_copy(const at::Tensor& part, std::string_view label)
    const {
  const at::Tensor gathered = at::empty(
      {layout_.travel_numel()},
      part.options().device(device_).pinned_memory(false));
  if (layout_.num_ranks() == 1) {
    gathered.copy_(part);
    return gathered;
  }
  if (layout_.travel() == Layout::Travel::Whole) {
    place_among_zeros(
        layout_, groups_.shard.rank(), part.to(device_), gathered);
    groups_.shard.all_reduce(as_integers(gathered), ReduceOp::Sum, label);
    return gathered;
  }
  groups_.shard.all_gather_into(gathered, part.to(device_), label);
  if (layout_.travel() == Layout::Travel::Shards) {
    return gathered;
  }
  at::Tensor full = at::empty({layout_.full_numel()}, gathered.options());
  unpack(layout_, full, gathered);
  return full;
}

void Bundle::settle() noexcept {
  try {
    std::exchange(gather_.work, Work()).wait();
  } catch (const std::exception&) {
    // The caller has an error that says more, or nobody is left to report to.
  }
  gather_.into.reset();
  gradients_.settle();
}

size_t Bundle::full_bytes_now() const {
  return (shows_shard_ ? 0 : storage_->nbytes()) + cast_.bytes_now() +
      (gather_.into.defined() ? storage_of(gather_.into)->nbytes() : 0);
}

} // namespace tessera::engine
