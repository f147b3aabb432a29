#include "ddp/gradient_buckets.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "libtorch/alias.h"

namespace tessera::ddp {

GradientBuckets::GradientBuckets(
    const std::vector<NamedParam>& params,
    BucketLimits limits)
    : params_(params), limits_(limits), slots_(params.size()) {
  // Backward usually reaches the last parameters first.
  std::vector<size_t> order(params_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  arrange(order);
}

void GradientBuckets::arrange(const std::vector<size_t>& order) {
  buckets_.clear();
  std::vector<std::pair<at::ScalarType, at::Device>> kinds;
  std::vector<GradientSize> sizes;
  for (const size_t param : order) {
    const at::Tensor& tensor = params_[param].tensor;
    const std::pair kind(tensor.scalar_type(), tensor.device());
    const auto found = std::find(kinds.begin(), kinds.end(), kind);
    sizes.push_back(
        {.bytes = static_cast<int64_t>(tensor.nbytes()),
         .kind = found - kinds.begin()});
    if (found == kinds.end()) {
      kinds.push_back(kind);
    }
  }
  for (const auto& positions : pack_buckets(sizes, limits_)) {
    Bucket& bucket = buckets_.emplace_back();
    for (const size_t position : positions) {
      bucket.params.push_back(order[position]);
    }
  }
  has_memory_ = false;
}

void GradientBuckets::rearrange(
    const std::vector<size_t>& order,
    bool with_data,
    bool as_views) {
  std::vector<at::Tensor> old_views;
  for (const Slot& slot : slots_) {
    old_views.push_back(slot.view);
  }
  arrange(order);
  ensure_memory(with_data);
  for (size_t i = 0; as_views && i < params_.size(); ++i) {
    at::Tensor& gradient = params_[i].tensor.mutable_grad();
    if (gradient.defined() && gradient.is_alias_of(old_views[i])) {
      slots_[i].view.copy_(gradient);
      gradient = slots_[i].view;
    }
  }
}

void GradientBuckets::ensure_memory(bool with_data) {
  if (has_memory_) {
    return;
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    Bucket& bucket = buckets_[i];
    int64_t numel = 0;
    for (const size_t param : bucket.params) {
      numel += params_[param].tensor.numel();
    }
    bucket.num_missing = bucket.params.size();
    bucket.reduction = nullptr;
    if (with_data) {
      bucket.flat = at::empty(
          {numel},
          params_[bucket.params.front()].tensor.options().requires_grad(false));
    }
    int64_t begin = 0;
    for (const size_t param : bucket.params) {
      const at::Tensor& tensor = params_[param].tensor;
      slots_[param] = {.bucket = i};
      if (bucket.flat.defined()) {
        slots_[param].view =
            libtorch::alias_of(bucket.flat, tensor.sizes(), begin);
      }
      begin += tensor.numel();
    }
  }
  has_memory_ = true;
  ++num_moves_;
}

void GradientBuckets::fill(size_t param, bool as_view) {
  const Slot& slot = slots_[param];
  at::Tensor& gradient = params_[param].tensor.mutable_grad();
  if (!gradient.defined()) {
    slot.view.zero_();
    return;
  }
  const bool is_there =
      gradient.layout() == at::kStrided && gradient.is_alias_of(slot.view);
  if (!is_there) {
    slot.view.copy_(
        gradient.layout() == at::kStrided ? gradient : gradient.to_dense());
  }
  if (as_view && !is_there) {
    gradient = slot.view;
  }
}

void GradientBuckets::write_back(const std::vector<bool>& used, bool as_views) {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!used[i]) {
      continue;
    }
    at::Tensor& gradient = params_[i].tensor.mutable_grad();
    if (as_views) {
      gradient = slots_[i].view;
    } else if (gradient.defined() && gradient.layout() == at::kStrided) {
      gradient.detach().copy_(slots_[i].view);
    } else {
      gradient = slots_[i].view.clone();
    }
  }
}

void GradientBuckets::empty() {
  for (Bucket& bucket : buckets_) {
    bucket.num_missing = bucket.params.size();
    bucket.reduction = nullptr;
  }
  for (Slot& slot : slots_) {
    slot.is_ready = false;
  }
}

} // namespace tessera::ddp
