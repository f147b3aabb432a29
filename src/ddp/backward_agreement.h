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
  int64_t num_forwards = 0; // since the last reduction; negative: no inputs
};

/// The ranks tell each other their reports while gradients are on the way.
class BackwardExchange {
 public:
  /// Collective.
  BackwardExchange(const Group& group, const BackwardReport& mine);

  /// Waits. Throws on every rank if ranks made different numbers of forwards,
  /// or if any rank has parameters that are not averaged; otherwise returns
  /// whether any rank misses a gradient. Collective.
  bool any_missing();

 private:
  void compare_forwards() const;
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
