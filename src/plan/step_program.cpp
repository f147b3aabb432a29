#include "plan/step_program.h"

namespace tessera::plan {

int64_t UnitsProgram::share_of(size_t unit) const {
  const auto count = static_cast<int64_t>(model_.units.size());
  const int64_t share = activation_bytes_ / count;
  return unit == model_.root() ? activation_bytes_ - share * (count - 1)
                               : share;
}

double UnitsProgram::forward_flops(size_t unit) const {
  return 2 * static_cast<double>(model_.kind_of(unit).numel()) *
      static_cast<double>(tokens_);
}

void UnitsProgram::forward(Rank& rank, Account& account) const {
  Ledger& ledger = account.device;
  rank.touch(model_.root());
  for (size_t unit = 0; unit < model_.units.size(); ++unit) { // root again
    rank.touch(unit);
    account.clock.compute(forward_flops(unit));
    ledger.add(Kind::Activations, share_of(unit));
  }
}

void UnitsProgram::add_gradients(Rank& rank, size_t unit) const {
  const size_t count = model_.kind_of(unit).params.size();
  for (size_t param = count; param-- > 0;) {
    rank.add_gradient(unit, param);
  }
}

void UnitsProgram::backward(Rank& rank, Account& account) const {
  Ledger& ledger = account.device;
  // The root has parameters on both ends: its gradients are complete last.
  const size_t root = model_.root();
  rank.touch(root);
  account.clock.compute(2 * forward_flops(root));
  add_gradients(rank, root);
  ledger.drop(Kind::Activations, share_of(root));
  for (size_t unit = root; unit-- > 0;) {
    rank.touch(unit);
    account.clock.compute(2 * forward_flops(unit));
    add_gradients(rank, unit);
    rank.finish_unit(unit);
    ledger.drop(Kind::Activations, share_of(unit));
  }
  rank.finish_unit(root);
}

} // namespace tessera::plan
