// How a plan is shown.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace tessera::cli {

/// What fits into a limit, as far as it was asked for.
struct FitReport {
  int64_t limit_bytes = 0;
  bool fits = false;
  std::optional<std::string> grows; // "batch", "layers" or "width"
  std::optional<int64_t> largest; // of that; nothing: not even 1
  std::optional<int64_t> largest_numel; // parameters of that model
  std::optional<int64_t> smallest_world; // nothing: no number is enough
};

struct PlanReport {
  plan::Plan plan;
  plan::TrainingSetup setup;
  std::string strategy;
  std::vector<std::string> notes; // what was assumed
  std::optional<FitReport> fit;
};

std::string plan_text(const PlanReport& report);
std::string plan_json(const PlanReport& report);

} // namespace tessera::cli
