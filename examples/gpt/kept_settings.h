// What stays the same for the life of a run.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <functional>
#include <string>
#include <vector>

#include "settings.h"

namespace gpt {

/// Settings that stay the same for the life of a run. They are kept in
/// RUN/settings.json: whoever resumes the run need not give them again, and
/// cannot change them.
struct Kept {
  std::string name;
  std::function<nlohmann::json(const Settings&)> get;
  std::function<void(Settings&, const nlohmann::json&)> set;
};

std::vector<Kept> kept_settings();

/// Takes the settings that the run was started with, unless others are given.
/// Throws UsageError if these differ.
void take_kept(const CLI::App& app, Settings& settings);

} // namespace gpt
