// What stands in the way of capturing a step.
#pragma once

#include <string>

#include "train/captured/step_agreement.h"
#include "train/captured/step_parts.h"

namespace tessera::train {

/// Why no step of these parts can be captured; empty if some can.
std::string objection_to(const StepParts& parts, const StepRanks& ranks);

/// Why the next one cannot, though others may; empty if it can.
std::string present_objection_to(const StepParts& parts);

} // namespace tessera::train
