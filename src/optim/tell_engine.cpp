#include "optim/tell_engine.h"

#include "engine/plain_params.h"

namespace tessera::optim {

void tell_of_step(const ParamGroups& groups) {
  if (!engine::is_any_averaged()) {
    return;
  }
  std::vector<at::Tensor> params;
  for (const auto& group : groups) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  engine::note_step(params);
}

} // namespace tessera::optim
