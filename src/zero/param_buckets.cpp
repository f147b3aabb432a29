#include "zero/param_buckets.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace tessera::zero {

void ParamBuckets::build(const std::vector<std::vector<at::Tensor>>& owned) {
  const at::NoGradGuard no_grad;
  // Old buckets live as long as parameters use their memory.
  slots_.clear();
  pieces_.clear();
  for (const auto& params : owned) {
    auto& pieces = pieces_.emplace_back();
    std::vector<at::Device> devices;
    for (const at::Tensor& param : params) {
      if (!param.requires_grad()) {
        param.set_data(param.detach().clone());
        slots_.push_back({param, false, {}});
        pieces.push_back(param);
      } else if (
          std::find(devices.begin(), devices.end(), param.device()) ==
          devices.end()) {
        devices.push_back(param.device());
      }
    }
    for (const at::Device device : devices) {
      std::vector<at::Tensor> trainable;
      for (const at::Tensor& param : params) {
        if (param.requires_grad() && param.device() == device) {
          trainable.push_back(param);
        }
      }
      fill(pieces, trainable);
    }
  }
}

void ParamBuckets::fill(
    std::vector<at::Tensor>& pieces,
    const std::vector<at::Tensor>& params) {
  int64_t numel = 0;
  for (const at::Tensor& param : params) {
    numel += param.numel();
  }
  const at::Tensor bucket =
      at::empty({numel}, params.front().options().requires_grad(false));
  int64_t begin = 0;
  for (const at::Tensor& param : params) {
    const at::Tensor old = param.detach();
    const at::Tensor place = old.is_non_overlapping_and_dense()
        ? bucket.as_strided(old.sizes(), old.strides(), begin)
        : bucket.narrow(0, begin, old.numel()).view(old.sizes());
    place.copy_(old);
    param.set_data(place);
    begin += old.numel();
    slots_.push_back({param, true, bucket});
  }
  pieces.push_back(bucket);
}

bool ParamBuckets::are_current() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.param.requires_grad() == slot.is_trainable &&
        (!slot.is_trainable || slot.param.is_alias_of(slot.bucket));
  });
}

} // namespace tessera::zero
