#include "transfer/optim_tensors.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera::transfer {

OptimTensors::OptimTensors(
    const ModelParams& model,
    const TensorGroups& groups,
    std::string_view call) {
  int64_t id = 0;
  for (const auto& tensors : groups) {
    groups_.emplace_back();
    for (const at::Tensor& tensor : tensors) {
      OptimTensor one{id++, tensor, model.held_by(tensor)};
      if (one.members.empty()) {
        raise<c10::ValueError>(
            {.call = call},
            fmt::format(
                "the optimizer's parameter {} (group {}, shape [{}]) is not of this model. Build the optimizer on tessera::parameters(model).",
                one.id,
                groups_.size() - 1,
                fmt::join(tensor.sizes(), ", ")));
      }
      const bool is_new =
          by_leaf_
              .emplace(
                  tensor.unsafeGetTensorImpl(),
                  std::pair(groups_.size() - 1, groups_.back().size()))
              .second;
      if (!is_new) {
        raise<c10::ValueError>(
            {.call = call, .parameter = one.members.front()->name},
            fmt::format(
                "the optimizer has it twice, the second time as its parameter {}.",
                one.id));
      }
      groups_.back().push_back(std::move(one));
    }
  }
}

const OptimTensor* OptimTensors::holder_of(const ModelParam& param) const {
  const auto found = by_leaf_.find(param.leaf.unsafeGetTensorImpl());
  return found == by_leaf_.end()
      ? nullptr
      : &groups_[found->second.first][found->second.second];
}

TensorGroups tensors_of(const torch::optim::Optimizer& optim) {
  TensorGroups groups;
  for (const auto& group : optim.param_groups()) {
    groups.push_back(group.params());
  }
  return groups;
}

} // namespace tessera::transfer
