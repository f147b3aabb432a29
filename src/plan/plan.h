// The memory and traffic of a training run on each rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "plan/clock.h"
#include "plan/exported_program.h"
#include "plan/gpt.h"
#include "plan/ledger.h"
#include "plan/model.h"
#include "plan/setup.h"
#include "plan/traffic.h"

namespace tessera::plan {

/// A GPT by its shape, which determines the activations.
struct GptSubject {
  GptShape shape;
  GptRun run;
};

/// Any model; the user gives the size of activations, or it is not known.
struct ModelSubject {
  Model model;
  std::optional<int64_t> activation_bytes = std::nullopt;
  /// Tokens per rank per backward, by which each parameter is multiplied.
  int64_t tokens = 0;
};

/// A model whose program is known, and with it the activations.
struct ProgramSubject {
  Model model;
  ProgramRun run;
};

using Subject = std::variant<GptSubject, ModelSubject, ProgramSubject>;

/// Units of one kind.
struct UnitLine {
  std::string name; // of the first
  std::string last; // empty if there is one
  int64_t count = 0;
  int64_t numel = 0; // of each
  int64_t shard_bytes = 0;
  int64_t full_bytes = 0; // 0: full parameters are the shard itself
};

/// The most that a device or host holds, in a step after the first two.
struct Peak {
  Memory at_peak; // when the total is the highest
  Memory highest; // each kind at its own moment
};

struct Plan {
  std::string description;
  int64_t numel = 0;
  int64_t num_params = 0;
  Peak device;
  Peak host; // what offload moves there
  // On the device, in the same step.
  Memory at_rest; // between steps
  Memory before_forward; // the last forward of the step
  Memory after_forward;
  Memory after_backward;
  Wire wire; // of a step: all its forwards and backwards
  StepTime time; // likewise, by the speeds of the set-up
  std::vector<UnitLine> units; // in the order of forward
  bool knows_activations = true;
  /// Operators whose activations are only guessed, by name.
  std::vector<std::string> unknown_operators;
};

/// Walks through three steps, see [Note: walking through a step], of the rank
/// that has the most. Throws PlanError; exported::UnknownSize for a program
/// whose sizes depend on data.
Plan make_plan(const Subject& subject, const TrainingSetup& setup);

} // namespace tessera::plan
