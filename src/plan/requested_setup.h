// The training set-up that a request asks for.
#pragma once

#include <string>

#include "plan/request.h"
#include "plan/setup.h"

namespace tessera::plan {

/// The strategy's name: the one that was given, or the default.
std::string strategy_of(const Request& request);

/// Throws PlanError for flags that contradict each other.
TrainingSetup setup_of(const Request& request);

} // namespace tessera::plan
