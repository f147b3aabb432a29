#include "transfer/rank0_optim_source.h"

#include <tessera/error.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "base/byte_vector.h"
#include "transfer/optim_dict_form.h"

namespace tessera::transfer {

void Rank0OptimSource::check_reach() const {
  for (const ModelParam& param : model_.all()) {
    if (param.is_sharded()) {
      check_root(param, group_.global_ranks().front(), call_);
    }
  }
}

void Rank0OptimSource::check_values() const {
  for (const auto& [key, entry] : osd_.at("state").dict()) {
    for (const auto& [name, value] : entry.dict()) {
      if (value.is_sharded()) {
        raise<c10::ValueError>(
            {.call = call_, .parameter = key.text()},
            fmt::format(
                "its state \"{}\" is a sharded tensor; rank 0 must have full tensors.",
                name.name()));
      }
    }
  }
}

StateDict Rank0OptimSource::broadcast_skeleton() const {
  Bytes bytes;
  if (!receives()) {
    StateDict skeleton = osd_;
    for (const auto& [key, entry] : osd_.at("state").dict()) {
      StateDict& copy = skeleton.at("state").dict().at(key).dict();
      const ModelParam* param = model_.find(key.name());
      const auto shape =
          param == nullptr ? std::vector<int64_t>() : param->shape();
      for (const auto& [name, value] : entry.dict()) {
        if (const auto like = tensor_like(name.name(), value, shape)) {
          copy.set(name, ShardedTensor(like->sizes, like->dtype, {}, group_));
        }
      }
    }
    bytes = state_dict_to_bytes(skeleton);
  }
  return state_dict_from_bytes(
      group_.broadcast_bytes(bytes, 0, "optimizer state to load"), group_);
}

at::Tensor Rank0OptimSource::broadcast_whole(
    const std::string& param,
    const std::string& name,
    const ShardedTensor& like) const {
  const at::Tensor whole = receives()
      ? at::empty(like.sizes(), at::TensorOptions().dtype(like.dtype()))
      : tensor_of(param, name).cpu().clone().contiguous();
  group_.broadcast(whole, 0, param + "." + name);
  return whole;
}

void Rank0OptimSource::add_part(
    const ModelParam& param,
    const std::string& name,
    const at::Tensor& part) {
  parts_.push_back({&param, part});
  sources_.push_back(receives() ? at::Tensor() : tensor_of(param.name, name));
}

void Rank0OptimSource::scatter_parts() const {
  if (!parts_.empty()) {
    scatter(sources_, parts_, group_.global_ranks().front());
  }
}

at::Tensor Rank0OptimSource::tensor_of(
    const std::string& param,
    const std::string& name) const {
  const StateDict& entry = osd_.at("state").dict().at(param).dict();
  return entry.at(name).tensor().detach();
}

} // namespace tessera::transfer
