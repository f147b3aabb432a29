// The settings of a run, for people and for its log.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

#include "settings.h"

namespace gpt {

/// All settings that a run may be described by, after parsing.
std::vector<ShownSetting> table_of(
    const CLI::App& app,
    const Settings& settings,
    const Settings& defaults);

/// {GROUP: {NAME: VALUE}}. Numbers are numbers, the rest is text.
std::string json_of(const std::vector<ShownSetting>& table);

} // namespace gpt
