// Whether all ranks did the same.
#pragma once

#include <tessera/comm/group.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "engine/plain_watch.h"

namespace tessera::engine {

/// [Note: order check]
///
/// All ranks must start the same collectives in the same order; the order
/// comes from the program alone, and a branch that depends on the rank breaks
/// it. So each rank hashes (what, unit) of all it starts, and the ranks compare
/// their hashes once per backward, before an optimizer could step, and every
/// kGathersPerCheck gathers for programs that only evaluate.
///
/// Three more things travel with the hash at the end of a backward: whether a
/// user's hook threw on a rank, in which case all ranks throw; a digest of the
/// plain parameters, see [Note: plain parameters]; and whether a rank has a
/// parameter in doubt. A parameter that no rank used keeps an undefined
/// gradient; one that any rank used has a gradient on all ranks. Only where a
/// rank is in doubt, because it did not use a parameter, do the ranks exchange
/// what they used.
///
/// Thread safety: one thread at a time.
class OrderCheck {
 public:
  enum class Event : char { Gather = 'g', Reduction = 'r', Summon = 's' };

  explicit OrderCheck(const Group& group) : group_(group) {}

  void note(Event event, int unit);
  /// A user's hook threw in this backward: at its end all ranks do.
  void note_failure(std::exception_ptr failure) {
    failure_ = failure_ ? failure_ : std::move(failure);
  }

  /// True if many gathers were not compared yet.
  bool is_due() const {
    return unchecked_gathers_ >= kGathersPerCheck && !is_paused_;
  }
  /// Throws on all ranks, DisagreementError among others, unless they did the
  /// same. Collective.
  void compare() {
    exchange(false, 0);
  }
  /// The same at the end of a backward. `used` says for each parameter whose
  /// gradient was reduced whether this rank had a gradient. Returns whether any
  /// rank had one; nothing if no rank is in doubt.
  std::optional<std::vector<bool>> compare_with_use(
      const std::vector<bool>& used);
  /// For steps that are replayed, which end no backward: throws on all ranks,
  /// DisagreementError, if plain parameters differ. Collective.
  void compare_plain();

  /// Nobody to compare with.
  bool is_alone() const {
    return group_.size() == 1;
  }

  /// While paused, nothing is compared: a step is recorded, in which the ranks
  /// cannot tell each other anything. A parameter that this rank did not use is
  /// an error then.
  void pause(bool on) {
    is_paused_ = on;
    forget_events();
  }

  /// The next comparison begins here.
  void forget_events();
  /// Forgets all but the plain parameters: after an exception.
  void reset();

  /// Parameters beside the units.
  PlainWatch& plain() {
    return plain_;
  }

 private:
  static constexpr int kGathersPerCheck = 64;

  bool exchange(bool in_doubt, int64_t plain);
  [[noreturn]] void fail_after_hook(int rank);

  const Group group_;
  PlainWatch plain_;
  uint64_t hash_ = 0; // since the last comparison
  int unchecked_gathers_ = 0; // since then
  bool is_paused_ = false;
  std::exception_ptr failure_; // of a user's hook, in this backward
};

} // namespace tessera::engine
