// Reduces gradients that wait, without a backward.
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>

#include "engine/schedule.h"

namespace tessera::engine {

void Schedule::reduce_waiting(const std::vector<std::shared_ptr<Unit>>& units) {
  if (libtorch::in_backward()) {
    raise(
        {.call = "reduce_gradients"},
        "it was called inside a backward, which reduces by itself. Call it between backwards.");
  }
  const RecursiveMutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  bool any = false;
  try {
    for (const auto& unit : units) {
      if (&unit->schedule() == this && unit->gradients().has_waiting()) {
        any = true;
        reductions_.start(*unit);
        reductions_.finish();
      }
    }
    if (any) {
      end_backward();
    }
  } catch (...) {
    recover();
    throw;
  }
}

} // namespace tessera::engine
