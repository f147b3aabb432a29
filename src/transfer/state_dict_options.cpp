#include "transfer/state_dict_options.h"

#include <tessera/error.h>

namespace tessera::transfer {

void check_options(const char* call, const StateDictOptions& options) {
  if (options.broadcast_from_rank0() && !options.full_state_dict()) {
    raise<c10::ValueError>(
        {.call = call},
        "broadcast_from_rank0 needs full_state_dict: rank 0 has full tensors. Set both.");
  }
}

std::vector<Group> groups_for(
    const ModelParams& params,
    const StateDictOptions& options) {
  const Group root = params.root_group();
  return params.groups().empty() && options.broadcast_from_rank0() &&
          root.valid()
      ? std::vector<Group>{root}
      : params.groups();
}

} // namespace tessera::transfer
