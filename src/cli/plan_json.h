// A plan as JSON for programs.
#pragma once

#include <string>

#include "plan/answer.h"

namespace tessera::cli {

std::string plan_json(const plan::Answer& answer);

} // namespace tessera::cli
