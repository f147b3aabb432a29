// What `tessera plan` answers to a request.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/request.h"
#include "plan/suggestions.h"

namespace tessera::plan {

/// What fits into the memory that a request names.
struct FitAnswer {
  int64_t limit_bytes = 0;
  bool fits = false;
  std::optional<std::string> grows; // "batch", "layers" or "width"
  std::optional<int64_t> largest; // of that; nothing: not even 1 fits
  std::optional<int64_t> largest_numel; // parameters of the largest model
  std::optional<int64_t> smallest_world; // nothing: no number is enough
  std::vector<Suggestion> suggestions; // if it does not fit
};

struct Answer {
  Plan plan;
  TrainingSetup setup;
  std::string strategy;
  std::vector<std::string> notes; // what was assumed
  std::optional<FitAnswer> fit; // if the request names a limit
};

/// Throws PlanError for a request that cannot be planned, FileError for a
/// checkpoint that cannot be read.
Answer answer(const Request& request);

} // namespace tessera::plan
