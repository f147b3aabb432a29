#include "transfer/optim_names.h"

namespace tessera::transfer {

OptimGroupNames names_of(const OptimTensors& tensors) {
  OptimGroupNames result;
  for (const auto& group : tensors.groups()) {
    result.emplace_back();
    for (const OptimTensor& one : group) {
      for (const ModelParam* member : one.members) {
        result.back().push_back({member->name, member->leaf.requires_grad()});
      }
    }
  }
  return result;
}

} // namespace tessera::transfer
