#include "engine/bundle_gradients.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <exception>
#include <utility>

#include "engine/owners.h"

namespace tessera::engine {
namespace {

/// Where the gradient of a parameter goes, padding left out: one range, or a
/// column of (ranks, chunk) where chunks travel.
at::Tensor slot(const Layout& layout, const at::Tensor& buffer, size_t index) {
  return layout.travel() != Layout::Travel::Chunks
      ? buffer.narrow(0, layout.full_offset(index), layout.numel(index))
      : buffer.view({layout.num_ranks(), -1})
            .narrow(1, layout.chunk_offset(index), layout.chunk_numel(index));
}

/// From whole gradients to what this rank has of each, in the layout of the
/// shard.
void keep_own_part(
    const Layout& layout,
    int rank,
    const at::Tensor& whole,
    const at::Tensor& part) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (size_t index = 0; index < layout.num_params(); ++index) {
    const Run run = layout.run(index, rank);
    if (run.numel > 0) {
      to.push_back(part.narrow(0, run.shard_begin, run.numel));
      from.push_back(whole.narrow(
          0, layout.full_offset(index) + run.param_begin, run.numel));
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
}

} // namespace

BundleGradients::BundleGradients(
    const Layout& layout,
    const at::Tensor& shard,
    const at::TensorOptions& full,
    const Groups& groups,
    const UnitOptions& options,
    BufferPool& pool)
    : layout_(layout),
      shard_(shard),
      full_options_(full),
      groups_(groups),
      options_(options),
      pool_(pool),
      used_(layout_.num_params(), false) {}

at::ScalarType BundleGradients::reduce_dtype() const {
  return shard_.is_floating_point()
      ? options_.reduce_dtype.value_or(shard_.scalar_type())
      : shard_.scalar_type(); // complex
}

void BundleGradients::add(
    const std::vector<at::Tensor>& gradients,
    const std::vector<bool>& trainable) {
  const auto options = full_options_.dtype(reduce_dtype());
  // On one rank it becomes the gradient of the leaves and does not come back.
  at::Tensor buffer = layout_.num_ranks() == 1
      ? at::empty({layout_.shard_numel()}, options)
      : pool_.take({layout_.travel_numel()}, options);
  if (options_.one_leaf) {
    buffer.zero_(); // its padding is part of the leaf's gradient
  } // else what lies between parameters is never read
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  const auto copy = [&](const at::Tensor& place, const at::Tensor& source) {
    if (source.numel() > 0) {
      to.push_back(place);
      from.push_back(source);
    }
  };
  for (size_t index = 0; index < layout_.num_params(); ++index) {
    const at::Tensor target = slot(layout_, buffer, index);
    if (!trainable[index] || !gradients[index].defined()) {
      target.zero_();
      continue;
    }
    used_[index] = true;
    const at::Tensor gradient = gradients[index].is_sparse()
        ? gradients[index].to_dense()
        : gradients[index];
    if (layout_.travel() != Layout::Travel::Chunks) {
      copy(target.view(gradient.sizes()), gradient);
      continue;
    }
    // Whole chunks at once, then the last, shorter one.
    const int64_t numel = layout_.numel(index);
    const int64_t chunk = layout_.chunk_numel(index);
    const int64_t whole = chunk == 0 ? 0 : numel / chunk;
    const at::Tensor flat = gradient.reshape({-1});
    copy(
        target.narrow(0, 0, whole),
        flat.narrow(0, 0, whole * chunk).view({whole, chunk}));
    if (numel > whole * chunk) {
      copy(
          target[whole].narrow(0, 0, numel - whole * chunk),
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

void BundleGradients::start_reduction(bool all_reduce, std::string_view label) {
  all_reduces_ = all_reduce;
  if (!gradients_.defined()) { // only what an earlier one left
    reduced_ = std::exchange(partial_, at::Tensor());
    start_over_copies(label);
    return;
  }
  if (layout_.num_ranks() == 1) {
    reduced_ = std::exchange(gradients_, at::Tensor());
    start_over_copies(label);
    return;
  }
  if (layout_.travel() == Layout::Travel::Whole) {
    reduced_ = at::zeros({layout_.shard_numel()}, gradients_.options());
    reduction_ =
        groups_.shard.all_reduce_async(gradients_, ReduceOp::Avg, label);
    return;
  }
  reduced_ = at::empty({layout_.shard_numel()}, gradients_.options());
  reduction_ = groups_.shard.reduce_scatter_async(
      reduced_, gradients_, ReduceOp::Avg, label);
}

/// `reduced_` is the average over the shard group.
bool BundleGradients::start_over_copies(std::string_view label) {
  if (!groups_.replicate.valid()) {
    return false;
  }
  if (partial_.defined()) {
    reduced_.add_(std::exchange(partial_, at::Tensor()));
  }
  if (!all_reduces_) {
    return false;
  }
  reduction_ =
      groups_.replicate.all_reduce_async(reduced_, ReduceOp::Avg, label);
  return true;
}

bool BundleGradients::go_on_to_copies(std::string_view label) {
  if (!gradients_.defined()) { // they did not travel
    return false;
  }
  std::exchange(reduction_, Work()).wait();
  if (layout_.travel() == Layout::Travel::Whole) {
    keep_own_part(layout_, groups_.shard.rank(), gradients_, reduced_);
  }
  pool_.give(std::exchange(gradients_, at::Tensor()));
  return start_over_copies(label);
}

BundleGradients::Reduced BundleGradients::finish_reduction(
    std::string_view label) {
  go_on_to_copies(label);
  std::exchange(reduction_, Work()).wait();
  at::Tensor mean = std::exchange(reduced_, at::Tensor());
  if (groups_.replicate.valid() && !all_reduces_) {
    partial_ = std::move(mean);
    return {};
  }
  std::vector<bool> used(layout_.num_params(), false);
  used.swap(used_);
  return {mean.to(shard_.options().pinned_memory(false)), std::move(used)};
}

void BundleGradients::drop_reduction() noexcept {
  settle();
  reduced_.reset();
  gradients_.reset();
  partial_.reset();
  used_.assign(layout_.num_params(), false);
}

void BundleGradients::settle() noexcept {
  try {
    std::exchange(reduction_, Work()).wait();
  } catch (const std::exception&) {
    // Whoever calls has a reason that says more, or nobody is left to tell.
  }
}

size_t BundleGradients::bytes_now() const {
  size_t bytes = 0;
  for (const at::Tensor* held : {&gradients_, &reduced_, &partial_}) {
    bytes += held->defined() ? storage_of(*held)->nbytes() : 0;
  }
  return bytes;
}

} // namespace tessera::engine
