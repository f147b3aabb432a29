// What the ranks of a step do in a call: all of them the same.
#pragma once

#include <tessera/comm/group.h>

#include <cstdint>
#include <optional>
#include <string>

#include "train/captured/step_parts.h"

namespace tessera::train {

/// What a call does. Among ranks the last of these wins.
enum class Action { Replay, Record, Run };

struct Decision {
  Action action = Action::Run;
  std::string reason; // of Run
  /// The program knows that this call runs eagerly: that is nothing to warn of.
  bool is_expected = false;
};

/// The ranks that make a step together, see [Note: captured steps].
class StepRanks {
 public:
  explicit StepRanks(const StepParts& parts);

  /// Whether there are several. Alone a rank agrees with itself.
  bool are_several() const {
    return group_.has_value();
  }
  /// What all ranks do, if this rank would do `mine`. `collectives` are those
  /// of the graph that it would replay. Collective.
  Decision agree(Decision mine, uint64_t collectives) const;
  /// Whether every rank has captured the same collectives: if not, why not.
  /// `reason` says why this rank has captured nothing; empty: it has. Nothing
  /// is thrown for the reasons of others. Collective.
  std::string agree_on_capture(const std::string& reason, uint64_t collectives)
      const;

 private:
  const std::optional<Group> group_; // of several ranks
};

} // namespace tessera::train
