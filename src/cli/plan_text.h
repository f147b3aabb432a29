// A plan as text for people.
#pragma once

#include <string>

#include "cli/style.h"
#include "plan/answer.h"

namespace tessera::cli {

std::string plan_text(const plan::Answer& answer, const Style& style);

} // namespace tessera::cli
