#include "transfer/model_reader.h"

#include <unordered_set>

#include "transfer/param_parts.h"

namespace tessera::transfer {
namespace {

at::Tensor to_cpu_if(const at::Tensor& tensor, bool offload) {
  return offload && tensor.defined() ? tensor.cpu() : tensor;
}

} // namespace

ModelReader::ModelReader(
    const ModelParams& params,
    const StateDictOptions& options)
    : options_(options) {
  const bool on_root_only = options.full_state_dict() && options.cpu_offload();
  const Group group = params.root_group();
  if (on_root_only && group.valid()) {
    root_ = group.global_ranks().front();
    is_root_ = group.rank() == 0;
  }
  for (const ModelParam& param : params.all()) {
    params_.emplace(param.face.unsafeGetTensorImpl(), &param);
  }
}

bool ModelReader::wants(const StateEntry& entry) const {
  if (entry.is_buffer || !options_.ignore_frozen_params()) {
    return true;
  }
  return params_.at(entry.tensor.unsafeGetTensorImpl())->leaf.requires_grad();
}

std::vector<StateValue> ModelReader::read(
    const std::vector<StateEntry>& entries) {
  if (options_.full_state_dict()) {
    gather_sharded(entries);
  }
  std::vector<StateValue> values;
  for (const StateEntry& entry : entries) {
    values.push_back(read(entry));
  }
  return values;
}

const ModelParam* ModelReader::sharded_param_of(const StateEntry& entry) const {
  const auto found = params_.find(entry.tensor.unsafeGetTensorImpl());
  return found == params_.end() || !found->second->is_sharded() ? nullptr
                                                                : found->second;
}

void ModelReader::gather_sharded(const std::vector<StateEntry>& entries) {
  std::vector<ParamPart> parts;
  std::unordered_set<const ModelParam*> seen; // tied parameters once
  for (const StateEntry& entry : entries) {
    const ModelParam* param = sharded_param_of(entry);
    if (param != nullptr && seen.insert(param).second) {
      parts.push_back({param, param->own_part()});
    }
  }
  const auto wholes = gather(parts, root_, options_.cpu_offload());
  for (size_t i = 0; i < parts.size(); ++i) {
    wholes_.emplace(parts[i].param, wholes[i]);
  }
}

StateValue ModelReader::read(const StateEntry& entry) const {
  const ModelParam* param = sharded_param_of(entry);
  if (param == nullptr) {
    const at::Tensor tensor =
        to_cpu_if(entry.tensor.detach(), options_.cpu_offload());
    // Buffers may differ between ranks: they hold statistics of their inputs.
    return entry.is_buffer ? StateValue::of_any_rank(tensor)
                           : StateValue(tensor);
  }
  return options_.full_state_dict()
      ? StateValue(wholes_.at(param))
      : StateValue(param->sharded(
            to_cpu_if(param->own_part(), options_.cpu_offload())));
}

} // namespace tessera::transfer
