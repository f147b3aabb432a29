// How a plan is shown.
#pragma once

#include <string>

#include "plan/answer.h"

namespace tessera::cli {

std::string plan_text(const plan::Answer& answer);
std::string plan_json(const plan::Answer& answer);

} // namespace tessera::cli
