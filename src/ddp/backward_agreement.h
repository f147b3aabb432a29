// What the ranks tell each other when a backward has ended, and the errors that
// come of it on every rank.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace tessera::ddp {

/// Throws on every rank if a hook threw on any rank; `failure` is what the hook
/// threw on this rank. If hooks threw on some ranks only, gives `group` up,
/// since the hooks of the other ranks wait in collectives. Collective over
/// `control`.
void fail_if_any_hook_threw(
    const Group& group,
    const Group& control,
    std::exception_ptr& failure);

/// What a rank knows when its backward has ended.
struct BackwardReport {
  int64_t num_missing = 0; // parameters without a gradient
  std::vector<std::string> unknown; // parameters that train, not averaged
  /// A rank of a Join without inputs makes neither forwards nor steps.
  bool has_inputs = true;
  int64_t num_forwards = 0; // since the last reduction
  int64_t num_steps = 0; // of optimizers, since the last reduction
  /// Numbers of steps are compared among ranks where this is the same: see
  /// [Note: steps of ranks].
  uint64_t stepped = 0;
};

/// [Note: steps of ranks]
///
/// A rank whose backward reached no parameter has reduced nothing, and its next
/// backward would be averaged with the present one of the others, until the
/// end. Its optimizer has made a step nevertheless, so since the last reduction
/// it has made one more than those of the other ranks. That shows where
/// forwards do not pass through the handle, too. Optimizers of Tessera are
/// seen; see engine::note_step().
///
/// A program may divide the parameters among the optimizers of its ranks by
/// itself, as a ZeroRedundancyOptimizer does. Then a rank that has none makes
/// no steps. So only ranks that have ever stepped the same parameters are
/// compared; and all ranks at the first reduction, before which nobody steps.
/// A step without synchronisation is left out, since each rank may make as many
/// as it likes: from set_sync(false), or a gradient that is not reduced, to
/// set_sync(true) or a reduction.

/// The ranks tell each other their reports while gradients are on the way.
class BackwardExchange {
 public:
  /// Collective.
  BackwardExchange(const Group& group, const BackwardReport& mine);

  /// Waits. Throws on every rank if ranks made different numbers of forwards
  /// or steps, or if any rank has parameters that are not averaged; otherwise
  /// returns whether any rank misses a gradient. Collective.
  bool any_missing();

 private:
  void compare_progress() const;
  std::string progress_of(int rank) const;
  int64_t reported(int rank, int field) const;

  const Group group_;
  const std::vector<std::string> unknown_;
  const at::Tensor all_; // a row of numbers for each rank
  Work told_;
};

/// On a single rank: throws if it has parameters that are not averaged.
void refuse_unknown_alone(const BackwardReport& mine);

/// Throws if a replay of this backward would leave out what the ranks would
/// have to tell each other. `missing` are this rank's parameters without a
/// gradient.
void check_recorded(
    const BackwardReport& mine,
    const std::vector<std::string>& missing);

/// Throws on every rank. `names` are this rank's parameters without a gradient;
/// at least one rank has some. Collective.
[[noreturn]] void refuse_missing(
    const Group& group,
    const std::vector<std::string>& names,
    size_t num_params);

/// Which parameters any rank used. Collective.
std::vector<bool> used_anywhere(
    const Group& group,
    const std::vector<bool>& was_used);

} // namespace tessera::ddp
