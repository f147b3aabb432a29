#include "transfer/load_together.h"

#include <tessera/optim/state_dict.h>

#include "comm/group/all_or_none.h"
#include "optim/dictionary.h"

namespace tessera::transfer {

Snapshots load_together(
    const std::vector<Group>& groups,
    std::string_view call,
    const OptimizerRefs& optimizers,
    const std::vector<StateDict>& dicts) {
  Snapshots before;
  try {
    comm::all_or_none(groups, call, [&] {
      for (size_t i = 0; i < optimizers.size(); ++i) {
        before.push_back(optim::snapshot(optimizers[i]));
        optim::load_state_dict(optimizers[i], dicts[i]);
      }
    });
  } catch (...) {
    load_back(before);
    throw;
  }
  return before;
}

void load_back(const Snapshots& before) {
  for (const auto& give_back : before) {
    give_back();
  }
}

} // namespace tessera::transfer
