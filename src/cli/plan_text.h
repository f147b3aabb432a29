// A plan as text for people.
#pragma once

#include <string>

#include "plan/answer.h"

namespace tessera::cli {

std::string plan_text(const plan::Answer& answer);

} // namespace tessera::cli
