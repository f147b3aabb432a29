// All flags of the trainer.
#pragma once

#include <CLI/CLI.hpp>

#include "settings.h"

namespace gpt {

/// Adds the flags to `app`, by groups; parsing sets `settings`, whose values
/// until then are the defaults. Both must live until then.
void add_flags(CLI::App& app, Settings& settings);

} // namespace gpt
